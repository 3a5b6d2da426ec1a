"""`POST /v1/answer`: answers a question as JSON or as server-sent events."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from ragkv.answer import Answer, AnswerEvent, Delta, Reasoning, Retrieved, Source, Timings, TokenOrigins, Usage
from ragkv.server.json_body import JsonRoute
from ragkv.server.tenants import CurrentTenant
from ragkv.server.wire import ANSWER_ERRORS, STREAM, Choices, Frame, Question, as_json, check_ready, error_of, respond


class AnswerRequest(Choices):
    """A question and its options, which default to the server's configuration."""

    question: Question
    max_tokens: int | None = Field(
        None, ge=1, description="Longest answer in tokens: a limit, also where the context has room for less"
    )
    stream: bool = Field(
        False, description="Answer with server-sent events: `sources`, `reasoning`…, `delta`…, `done`, or `error`"
    )


class PlanResponse(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    way: str = Field(description="`fuse`, `fuse warm` (chunks on disk are computed) or `prefill` (by vLLM alone)")
    predicted_ms: float = Field(description="Time to first token that was expected")
    prefill_ms: float = Field(description="Time to first token that was expected of a full prefill")


class AnswerResponse(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    answer: str = Field(validation_alias="text")
    reasoning_content: Annotated[str | None, BeforeValidator(lambda text: text or None)] = Field(
        validation_alias="reasoning", description="What the model thought before it answered; null if it didn't"
    )
    sources: list[Source] = Field(description="In the order of the prompt")
    policy: str = Field(validation_alias=AliasPath("policy", "label"), description="The policy that was used")
    fallback: str | None = Field(
        description="What the answer lacks: KV that wasn't reused, sources that had no room or weren't found; else null"
    )
    usage: Usage
    timings: Timings
    plan: PlanResponse | None = Field(description="What the controller chose; null if it wasn't asked")
    drift_estimate: float | None = Field(description="From full prefill's answer, in nats; null without `max_drift`")
    attempts: int = Field(description="How often the answer was begun, until its estimate was within `max_drift`")
    finish_reason: Literal["stop", "length"]
    hint_refused: str | None = Field(
        description="Why the `hint` isn't kept, null if it is: more pins than the disk holds"
    )
    prompt: TokenOrigins | None = Field(
        validation_alias="origins", description="Where each prompt token's KV came from; null unless `explain`"
    )


_STREAMED = {"answer", "reasoning_content", "sources"}  # fields that a stream has sent when it is done
router = APIRouter(route_class=JsonRoute)


@router.post("/v1/answer", response_model=AnswerResponse, responses={200: STREAM, **ANSWER_ERRORS})
async def answer(body: AnswerRequest, request: Request, tenant: CurrentTenant) -> Response | AnswerResponse:
    """Answer a question from the indexed documents."""
    options = body.options(tenant.pipeline.defaults, body.max_tokens)
    check_ready(tenant.pipeline)
    events = tenant.answer(body.question, options)
    return await respond(request, events, _frames if body.stream else None, AnswerResponse.model_validate)


def _frames(event: AnswerEvent | Exception) -> Iterable[Frame]:
    match event:
        case Retrieved():
            name, data = "sources", asdict(event)
        case Reasoning():
            name, data = "reasoning", asdict(event)
        case Delta():
            name, data = "delta", asdict(event)
        case Answer():
            name, data = "done", AnswerResponse.model_validate(event).model_dump(exclude=_STREAMED)
        case _:
            name, data = "error", error_of(event)
    yield {"event": name, "data": as_json(data)}
