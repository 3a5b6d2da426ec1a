"""`POST /v1/answer`: answers a question as JSON or as server-sent events."""

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from ragkv.answer import Answer, AnswerEvent, Delta, Retrieved, Timings, TokenOrigins, Usage
from ragkv.server.tenants import CurrentTenant
from ragkv.server.wire import (
    ANSWER_ERRORS,
    STREAM,
    Choices,
    Frame,
    PlanResponse,
    Question,
    SourceResponse,
    as_json,
    check_ready,
    respond,
)


class AnswerRequest(Choices):
    """A question and its options, which default to the server's configuration."""

    question: Question
    max_tokens: int | None = Field(None, ge=1, description="Longest answer in tokens")
    stream: bool = Field(False, description="Answer with server-sent events: `sources`, `delta`…, `done`, or `error`")


class AnswerResponse(BaseModel):
    answer: str
    sources: list[SourceResponse] = Field(description="In the order of the prompt")
    policy: str = Field(description="The policy that was used")
    fallback: str | None = Field(description="Why KV wasn't reused, if it wasn't")
    usage: Usage
    timings: Timings
    plan: PlanResponse | None = Field(description="What the controller chose; null if it wasn't asked")
    finish_reason: str
    prompt: TokenOrigins | None = Field(description="Where each prompt token's KV came from; null unless `explain`")

    @classmethod
    def of(cls, answer: Answer) -> "AnswerResponse":
        return cls(
            answer=answer.text,
            sources=[SourceResponse.of(source) for source in answer.sources],
            policy=answer.policy.label,
            fallback=answer.fallback,
            usage=answer.usage,
            timings=answer.timings,
            plan=PlanResponse.model_validate(answer.plan, from_attributes=True) if answer.plan else None,
            finish_reason=answer.finish_reason,
            prompt=answer.origins,
        )


router = APIRouter()


@router.post("/v1/answer", response_model=AnswerResponse, responses={200: STREAM, **ANSWER_ERRORS})
async def answer(body: AnswerRequest, request: Request, tenant: CurrentTenant) -> Response | AnswerResponse:
    """Answer a question from the indexed documents."""
    options = body.options(tenant.pipeline.defaults, body.max_tokens)
    check_ready(tenant.pipeline)
    events = tenant.observed.answer(body.question, options)
    return await respond(request, events, _frames if body.stream else None, _error_frames, AnswerResponse.of)


def _frames(event: AnswerEvent) -> Iterable[Frame]:
    if isinstance(event, Retrieved):
        sources = [SourceResponse.of(source).model_dump() for source in event.sources]
        return [_frame("sources", {"sources": sources})]
    if isinstance(event, Delta):
        return [_frame("delta", {"text": event.text})]
    return [_frame("done", AnswerResponse.of(event).model_dump(exclude={"answer", "sources"}))]


def _error_frames(error: dict[str, Any]) -> Iterable[Frame]:
    return [_frame("error", error)]


def _frame(name: str, data: dict[str, Any]) -> Frame:
    return {"event": name, "data": as_json(data)}
