"""A request of OpenAI's chat completions, and what it means here: a conversation, and how its answer is sampled.

Fields of https://platform.openai.com/docs/api-reference/chat and of vLLM's server that would change the answer, and
can't be honoured, are refused by name. All other unknown fields are ignored, as vLLM does, and counted.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ragkv.answer import Conversation, Sampling, Turn
from ragkv.config import AnswerConfig
from ragkv.reasoning import without_reasoning
from ragkv.retriever.documents import is_visible
from ragkv.server.wire import Choices

MAX_STOPS, MAX_STOP_LENGTH = 4, 1000  # OpenAI's and vLLM's number; characters of each, which a stream holds back
_MAX_MESSAGES, _MAX_PARTS = 10_000, 10_000
# Fields that can't be honoured, and the values that ask for nothing.
_ONLY: dict[str, Sequence[Any]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "use_beam_search": (False,),
    "echo": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
# `fail_fast`: to tell all errors of ten thousand items would take as long as to answer.
_PARTS = Field(fail_fast=True, max_length=_MAX_PARTS)
# Whose words a message has. A tool's result belongs to the question that it was fetched for.
_SIDES = {"system": "system", "developer": "system", "assistant": "assistant"}
_LAST = (
    "the last message must be the user's, with some text: the question. An answer can't be continued: leave out what "
    "the assistant says after it"
)


class Part(BaseModel):
    """A part of a message. Others than text are refused."""

    type: str = Field(description="`text`, or in an assistant's message `refusal`")
    text: str | None = None
    refusal: str | None = None


class Message(BaseModel):
    """A message. Other fields are ignored: clients send earlier answers back as they were."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, Field(max_length=1_000_000)] | Annotated[list[str | Part], _PARTS] | None = None
    tool_calls: list[Any] | None = Field(None, description="Only the tools' results are read")
    function_call: Any = None

    @field_validator("content")
    @classmethod
    def _is_text(cls, content: str | list[str | Part] | None) -> str | list[str | Part] | None:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Part) and part.text is None and part.refusal is None:
                raise ValueError(f"a part of type {part.type[:100]!r} can't be read here; send text only")
        return content

    @property
    def text(self) -> str:
        if self.tool_calls or self.function_call:  # what is said with a call is no answer
            return ""
        if isinstance(self.content, list):
            return "\n".join(p if isinstance(p, str) else p.text or p.refusal or "" for p in self.content)
        return self.content or ""

    @property
    def side(self) -> str:
        return _SIDES.get(self.role, "user")


class StreamOptions(BaseModel):
    include_usage: bool | None = False


class SampledRequest(BaseModel):
    """What OpenAI's requests have in common: how the answer is sampled. model_extra: the fields that are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="The model being served, as /v1/models has it")
    max_tokens: int | None = Field(None, ge=1, description="A limit: what doesn't fit into the context isn't generated")
    temperature: float | None = Field(None, ge=0, le=2, description="0, greedy, unless given")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="Tokens to draw from; 0 and -1: all. Not of chunks")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: (
        Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        """Raise ValueError for a field that can't be honoured; drop those that ask for nothing."""
        if not isinstance(body, dict):
            return body
        for name, values in _ONLY.items():
            if body.get(name) is not None and not _is_one_of(body[name], values):
                accepted = " or ".join(json.dumps(value) for value in values)
                raise ValueError(
                    f"{name} can't be used here: leave it out" + f"; {accepted} is accepted" * bool(values)
                )
        return {name: value for name, value in body.items() if name not in _ONLY}

    def sampling(self, defaults: AnswerConfig) -> Sampling:
        names = {field.name for field in fields(Sampling)} - {"stop"}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling.of(defaults, **self.model_dump(include=names, exclude_none=True), stop=stop)


class ChatRequest(SampledRequest):
    """A conversation, of which the last message is to be answered."""

    messages: list[Message] = Field(
        min_length=1,
        max_length=_MAX_MESSAGES,
        fail_fast=True,
        description="The last one, system messages aside, is the user's or a tool's result. System messages are added "
        "to the server's own instruction, wherever they stand; empty ones, calls of tools, and what an assistant says "
        "before any user are left out",
    )
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ragkv: Choices = Choices()

    @model_validator(mode="before")
    @classmethod
    def _limit(cls, body: Any) -> Any:
        messages = body.get("messages") if isinstance(body, dict) else None
        contents = map(_content, messages if isinstance(messages, list) else ())
        if sum(len(content) for content in contents if isinstance(content, list)) > _MAX_PARTS:
            raise ValueError(f"messages have more than {_MAX_PARTS} parts together; join their texts")
        return body

    @field_validator("messages")
    @classmethod
    def _asks(cls, messages: list[Message]) -> list[Message]:
        last = next(_by_side(reversed(messages)), [])
        if not any(message.role == "user" for message in last):
            raise ValueError(_LAST)
        return messages

    def conversation(self) -> Conversation:
        """Return the messages as turns; consecutive messages of one side are joined."""
        own = "\n\n".join(m.text for m in self.messages if m.side == "system" and m.text.strip())
        sides = list(_by_side(self.messages))
        if sides[0][0].side == "assistant":
            del sides[0]
        said = [(side[0].side, "\n\n".join(message.text for message in side)) for side in sides]
        texts = [without_reasoning(text) if side == "assistant" else text for side, text in said]
        return Conversation(texts[-1], tuple(map(Turn, texts[:-1:2], texts[1::2])), own)


def _content(message: Any) -> Any:
    """Return what a message says that is or isn't validated yet."""
    return (
        message.content
        if isinstance(message, Message)
        else message.get("content")
        if isinstance(message, dict)
        else None
    )


def _is_one_of(value: Any, accepted: Sequence[Any]) -> bool:
    return any(type(value) is type(each) and value == each for each in accepted)


def _by_side(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Yield what user and assistant said, in turns."""
    said = (message for message in messages if message.side != "system" and is_visible(message.text))
    for _, side in groupby(said, lambda message: message.side):
        yield list(side)
