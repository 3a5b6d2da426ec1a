"""OpenAI's chat completions and model list, answered from the documents.

Fields of https://platform.openai.com/docs/api-reference/chat that this server can't honour are refused by name; fields
that don't change an answer are ignored. The response's extension field `ragkv` has the sources and figures, the
request's field of the same name (`extra_body` in OpenAI's own client) the options.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from openai.types import Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ragkv.answer import Answer, AnswerEvent, Conversation, Delta, Retrieved, Sampling, Turn
from ragkv.retriever.documents import is_visible
from ragkv.server.answers import AnswerResponse
from ragkv.server.tenants import AllTenants, CurrentTenant
from ragkv.server.wire import (
    ANSWER_ERRORS,
    STREAM,
    Choices,
    Frame,
    as_json,
    check_ready,
    error_of,
    errors,
    respond,
)

_DONE: Frame = {"data": "[DONE]"}
_EXTENSION = {"answer", "finish_reason"}  # fields that the extension leaves out: OpenAI's own fields have them
# Ignored: who asks, how it is billed or stored, and what belongs to tools.
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity"),
}
# Fields that can't be honoured, and the values that ask for nothing.
_ONLY: dict[str, Sequence[Any]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


class TextPart(BaseModel):
    type: Literal["text"] = Field(description="Only text can be read")
    text: str


class Message(BaseModel):
    """A message. Other fields are ignored: clients send earlier answers back as they were."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=1_000_000)] | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[Message] = Field(
        min_length=1,
        max_length=1000,
        description="The last one is the user's. System messages are added to the server's own instruction; what an "
        "assistant says before any user is left out",
    )
    model: str | None = Field(None, description="The model being served, as /v1/models has it")
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, description="0, greedy, unless given")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] | None = Field(None, max_length=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ragkv: Choices = Choices()

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        """Raise ValueError for a field that can't be honoured; drop the ignored ones."""
        if not isinstance(body, dict):
            return body
        for name, values in _ONLY.items():
            if body.get(name) is not None and body[name] not in values:
                only = f"; {' or '.join(map(as_json, values))} is accepted" if values else ""
                raise ValueError(f"{name} can't be used here: leave it out{only}")
        return {name: value for name, value in body.items() if name not in _ONLY and name not in _WITHOUT_EFFECT}

    @field_validator("messages")
    @classmethod
    def _asks(cls, messages: list[Message]) -> list[Message]:
        if messages[-1].role != "user" or not is_visible(messages[-1].text):
            raise ValueError("the last message must be the user's, with some text: the question")
        return messages

    def conversation(self) -> Conversation:
        """Return the messages as turns; consecutive messages of one role are joined."""
        own = "\n\n".join(m.text for m in self.messages if m.role in ("system", "developer"))
        said = [message for message in self.messages if message.role in ("user", "assistant")]
        sides = [(role, "\n\n".join(m.text for m in group)) for role, group in groupby(said, lambda m: m.role)]
        if sides[0][0] == "assistant":
            del sides[0]
        texts = [text for _, text in sides]
        return Conversation(texts[-1], tuple(map(Turn, texts[:-1:2], texts[1::2])), own)

    def sampling(self) -> Sampling:
        names = {"temperature", "top_p", "seed", "frequency_penalty", "presence_penalty"}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(**self.model_dump(include=names, exclude_none=True), stop=stop)


class ChatResponse(ChatCompletion):
    ragkv: dict[str, Any] = Field(description="As /v1/answer has it: sources, policy, usage, timings, plan, fallback")


class ModelCard(Model):
    max_model_len: int | None = Field(description="Longest prompt and answer in tokens; null: the model's own limit")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


router = APIRouter()
_started = int(time.time())


@router.get("/v1/models", response_model_exclude_unset=True)
async def models(tenants: AllTenants) -> ModelList:
    """Return the model that answers."""
    model = tenants.config.model
    card = ModelCard(
        id=model.name, object="model", created=_started, owned_by="ragkv", max_model_len=model.max_model_len
    )
    return ModelList(object="list", data=[card])


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
    model = tenants.config.model.name
    if body.model not in (None, model):
        raise HTTPException(404, f"the model {body.model} isn't served here; it is {model}")
    max_tokens = body.max_completion_tokens or body.max_tokens
    options = body.ragkv.options(tenant.pipeline.defaults, max_tokens, body.sampling())
    check_ready(tenant.pipeline)
    events = tenant.answer(body.conversation(), options)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    completion = _Completion(model, with_usage)
    return await respond(request, events, completion.frames if body.stream else None, completion.response)


class _Completion:
    """One completion as a response or as frames. The first frame, with the sources, waits for the first token, as in
    vLLM: clients take the time to it for the time to first token."""

    def __init__(self, model: str, with_usage: bool) -> None:
        self._opening: Frame | None = None
        self._with_usage = with_usage
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def response(self, answer: Answer) -> ChatResponse:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(answer)}
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
        else:
            extension = AnswerResponse.model_validate(event).model_dump(exclude={*_EXTENSION, "sources"})
            yield self._choice({}, _finish_reason(event), ragkv=extension)
            if self._with_usage:
                yield self._chunk({"choices": [], "usage": _usage(event)})
            yield _DONE

    def _choice(self, delta: dict[str, str], finish_reason: str | None = None, **fields: Any) -> Frame:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._chunk({"choices": [choice], **fields})

    def _chunk(self, data: dict[str, Any]) -> Frame:
        return {"data": as_json({**self._head, "object": "chat.completion.chunk", **data})}


def _usage(answer: Answer) -> dict[str, Any]:
    """Return OpenAI's counts. Cached tokens are those from vLLM's prefix cache or from the store."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.prefix_tokens + usage.reused_tokens},
    }


def _finish_reason(answer: Answer) -> str:
    return "length" if answer.finish_reason == "length" else "stop"
