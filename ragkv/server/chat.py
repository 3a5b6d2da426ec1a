"""OpenAI's chat completions and model list, answered from the documents.

The response's extension field `ragkv` has the sources and figures, the request's field of the same name (`extra_body`
in OpenAI's own client) the options.
"""

import asyncio
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from openai.types import Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from ragkv.answer import Answer, AnswerEvent, Delta, Reasoning, Retrieved
from ragkv.server.answers import AnswerResponse
from ragkv.server.chat_request import ChatRequest
from ragkv.server.json_body import JsonRoute
from ragkv.server.tenants import AllTenants, CurrentTenant, Tenants
from ragkv.server.wire import ANSWER_ERRORS, STREAM, Frame, as_json, check_ready, error_of, errors, respond

_DONE: Frame = {"data": "[DONE]"}
# Fields that the extension leaves out: OpenAI's own fields have them.
_EXTENSION = {"answer", "reasoning_content", "finish_reason"}


class ChatResponse(ChatCompletion):
    ragkv: dict[str, Any] = Field(description="As /v1/answer has it: sources, policy, usage, timings, plan, fallback")


class ModelCard(Model):
    max_model_len: int | None = Field(description="Longest prompt and answer in tokens; null: the model's own limit")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


router = APIRouter(route_class=JsonRoute)
_started = int(time.time())


@router.get("/v1/models", response_model_exclude_unset=True)
async def models(tenants: AllTenants) -> ModelList:
    """Return the model that answers."""
    return ModelList(object="list", data=[_card(tenants)])


@router.get("/v1/models/{id:path}", response_model_exclude_unset=True, responses=errors(404, 422))
async def model(id: str, tenants: AllTenants) -> ModelCard:
    """Return the model that answers, by its id."""
    _check_served(id, tenants)
    return _card(tenants)


def _card(tenants: Tenants) -> ModelCard:
    config = tenants.config.model
    return ModelCard(
        id=config.name, object="model", created=_started, owned_by="ragkv", max_model_len=config.max_model_len
    )


def _check_served(model: str, tenants: Tenants) -> None:
    served = tenants.config.model.name
    if model != served:
        raise HTTPException(404, f"the model {model} isn't served here; it is {served}")


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    response_model_exclude_unset=True,
    responses={200: STREAM, **errors(404), **ANSWER_ERRORS},
)
async def complete(
    body: ChatRequest, request: Request, tenant: CurrentTenant, tenants: AllTenants
) -> Response | ChatResponse:
    """Answer the last message of a conversation from the indexed documents."""
    if body.model:
        _check_served(body.model, tenants)
    tenants.metrics.ignored(body.model_extra or ())
    max_tokens = body.max_completion_tokens or body.max_tokens
    options = body.ragkv.options(tenant.pipeline.defaults, max_tokens, body.sampling(tenant.pipeline.defaults))
    check_ready(tenant.pipeline)
    conversation = await asyncio.to_thread(body.conversation)
    events = tenant.answer(conversation, options)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    completion = _Completion(tenants.config.model.name, with_usage)
    return await respond(request, events, completion.frames if body.stream else None, completion.response)


class _Completion:
    """One completion as a response or as frames. The first frame, with the sources, waits for the first token, as in
    vLLM: clients take the time to it for the time to first token."""

    def __init__(self, model: str, with_usage: bool) -> None:
        self._opening: Frame | None = None
        self._with_usage = with_usage
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def response(self, answer: Answer) -> ChatResponse:
        message = {"role": "assistant", "content": answer.text, "refusal": None, **_reasoning(answer.reasoning)}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        extension = AnswerResponse.model_validate(answer).model_dump(exclude=_EXTENSION)
        body = {"object": "chat.completion", "choices": [choice], "usage": _usage(answer), "ragkv": extension}
        return ChatResponse.model_validate({**self._head, **body})

    def frames(self, event: AnswerEvent | Exception) -> Iterable[Frame]:
        if isinstance(event, Retrieved):
            self._opening = self._choice({"role": "assistant", "content": ""}, ragkv=asdict(event))
            return
        if isinstance(event, Exception):
            yield {"data": as_json(error_of(event))}
            yield _DONE
            return
        if self._opening is not None:
            yield self._opening
            self._opening = None
        if isinstance(event, Delta):
            yield self._choice({"content": event.text})
        elif isinstance(event, Reasoning):
            yield self._choice(_reasoning(event.text))
        else:
            extension = AnswerResponse.model_validate(event).model_dump(exclude={*_EXTENSION, "sources"})
            yield self._choice({}, event.finish_reason, ragkv=extension)
            if self._with_usage:
                yield self._chunk({"choices": [], "usage": _usage(event)})
            yield _DONE

    def _choice(self, delta: dict[str, str], finish_reason: str | None = None, **fields: Any) -> Frame:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._chunk({"choices": [choice], **fields})

    def _chunk(self, data: dict[str, Any]) -> Frame:
        return {"data": as_json({**self._head, "object": "chat.completion.chunk", **data})}


def _reasoning(text: str) -> dict[str, str]:
    """Return the message's field for reasoning, as DeepSeek's API and vLLM's server have it."""
    return {"reasoning_content": text} if text else {}


def _usage(answer: Answer) -> dict[str, Any]:
    """Return OpenAI's counts. Cached tokens are those from vLLM's prefix cache or from the store."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.prefix_tokens + usage.reused_tokens},
    }
