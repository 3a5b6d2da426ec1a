"""The lines of a batch: OpenAI's batch requests for the model itself, and questions for the home's documents."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragkv.errors import ConfigError
from ragkv.server.answers import AnswerRequest
from ragkv.server.chat_request import ChatRequest, SampledRequest
from ragkv.server.wire import Choices

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_MAX_PROBLEMS = 10


class CompletionRequest(SampledRequest):
    """A request of /v1/completions: a prompt, which the model continues as it is."""

    prompt: str | list[int] = Field(min_length=1, max_length=1_000_000)
    max_tokens: int | None = Field(_COMPLETION_TOKENS, ge=1)
    stream: Literal[False] | None = None


@dataclass(frozen=True)
class BatchRequest:
    """A line. body: a chat or a prompt for the model, or a question that is answered from documents."""

    custom_id: str
    body: ChatRequest | CompletionRequest | AnswerRequest


class _Line(BaseModel):
    """https://platform.openai.com/docs/api-reference/batch/request-input"""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str = Field(min_length=1, max_length=1_000)
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


def read(file: Path, model: str) -> list[BatchRequest]:
    """Read all requests of a file, a JSON object in each line; blank lines don't count.

    A line with `question` is a question, with the options of /v1/answer; its `custom_id` is `line-N` unless given. All
    others are OpenAI's. model: the one that answers. Raises ConfigError, which names the lines that can't be used.
    """
    requests, problems, lines = list[BatchRequest](), list[str](), dict[str, int]()
    for number, line in _lines(file):
        try:
            request = _parsed(line, number, model)
        except ValidationError as error:
            problems.append(f"line {number}: {'; '.join(map(_problem, error.errors()[:3]))}")
        except ValueError as error:
            problems.append(f"line {number}: {error}")
        else:
            before = lines.setdefault(request.custom_id, number)
            if before != number:
                problems.append(f"line {number}: the custom_id {request.custom_id!r} is also that of line {before}")
            requests.append(request)
        if len(problems) == _MAX_PROBLEMS:
            break
    if problems:
        more = " (and perhaps more)" * (len(problems) == _MAX_PROBLEMS)
        raise ConfigError("\n".join([f"{file} has lines that can't be used; nothing was run{more}:", *problems]))
    if not requests:
        raise ConfigError(f'{file} has no requests: put a JSON object into each line, such as {{"question": "…"}}')
    return requests


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} isn't UTF-8 text: {error}") from error


def _parsed(line: str, number: int, model: str) -> BatchRequest:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it isn't JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("it isn't a JSON object")
    if "question" in fields:
        custom_id = fields.pop("custom_id", f"line-{number}")
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError(f"custom_id: {custom_id!r} isn't a text")
        return BatchRequest(custom_id, AnswerRequest.model_validate(fields))
    checked = _Line.model_validate(fields)
    kind = ChatRequest if checked.url == "/v1/chat/completions" else CompletionRequest
    body = kind.model_validate(checked.body)
    if isinstance(body, ChatRequest) and (body.stream or body.ragkv != Choices()):
        raise ValueError("body.stream and body.ragkv are for a server; a question from documents is a line of its own")
    if body.model not in (None, model):
        raise ValueError(f"body.model: {body.model!r} isn't the model that answers here; it is {model!r}")
    return BatchRequest(checked.custom_id, body)


def _problem(detail: Any) -> str:
    return f"{'.'.join(map(str, detail['loc'])) or 'body'}: {detail['msg']}"
