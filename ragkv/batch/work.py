"""What each request of a batch asks of the engine: its prompt, which of it others have too, and how it is answered."""

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ragkv.answer import Answer, AnswerOptions, Conversation, Sampling
from ragkv.batch.requests import BatchRequest, CompletionRequest
from ragkv.batch.sharing import Item, Part, by_popularity
from ragkv.engine.engine import Engine
from ragkv.engine.task import PrefixUse
from ragkv.errors import ConfigError, ContextTooLongError, EngineStoppedError, RagKVError
from ragkv.pipeline import Pipeline
from ragkv.retriever.documents import is_visible
from ragkv.routing import exact_salt
from ragkv.server.answers import AnswerRequest, AnswerResponse
from ragkv.server.chat_request import ChatRequest


@dataclass(frozen=True)
class Outcome:
    """An answer as the body of a response, and its tokens: of the prompt, of these from earlier KV, and generated."""

    body: dict[str, Any]
    num_prompt: int
    num_reused: int
    num_generated: int


@dataclass(frozen=True)
class Work:
    """A request that is ready to run. is_exact: whether its parts are blocks that requests share while they run; those
    of others are chunks, which each has a copy of.

    run: answers it, and raises RagKVError if it can't.
    """

    custom_id: str
    item: Item
    run: Callable[[], Awaitable[Outcome]]
    is_exact: bool = True


class Preparation:
    """Turns requests into work for one tenant's pipeline, whose engine runs."""

    def __init__(self, pipeline: Pipeline, engine: Engine) -> None:
        self._pipeline, self._engine = pipeline, engine
        self._layout = pipeline.workspace.layout
        self._salt = exact_salt(pipeline.tenant)
        self._model = pipeline.config.model.name

    def prepare(self, requests: Sequence[BatchRequest]) -> tuple[list[Work], dict[str, RagKVError]]:
        """Return the work of each request, and why there is none for others, by their custom_id.

        Of thousands it takes minutes: call it in a thread.
        """
        works, problems = list[Work](), dict[str, RagKVError]()
        for request in requests:
            try:
                works.append(self._work(request))
            except (ConfigError, ContextTooLongError) as error:
                problems[request.custom_id] = error
        asking = [work for work in works if not work.is_exact]
        ranked = by_popularity([work.item.parts for work in asking])
        asking = [replace(w, item=replace(w.item, parts=p)) for w, p in zip(asking, ranked, strict=True)]
        return [*(work for work in works if work.is_exact), *asking], problems

    def _work(self, request: BatchRequest) -> Work:
        if isinstance(request.body, AnswerRequest):
            return self._question(request.custom_id, request.body)
        return self._prompt(request.custom_id, request.body)

    def _question(self, custom_id: str, body: AnswerRequest) -> Work:
        options = body.options(self._pipeline.defaults, body.max_tokens)
        _, fitted = self._pipeline.retrieve(Conversation(body.question), options, self._engine.max_model_len)
        chunks = [(hit.chunk.chunk_hash, len(hit.chunk.token_ids)) for hit in fitted.hits]
        item = Item(tuple(chunks), len(fitted.prompt.token_ids), options.max_tokens)
        return Work(custom_id, item, partial(self._ask, body.question, options), is_exact=False)

    async def _ask(self, question: str, options: AnswerOptions) -> Outcome:
        async with aclosing(self._pipeline.answer(question, options)) as events:
            async for event in events:
                if isinstance(event, Answer):
                    usage, body = event.usage, AnswerResponse.model_validate(event).model_dump()
                    reused = usage.prefix_tokens + usage.reused_tokens
                    return Outcome(body, usage.prompt_tokens, reused, usage.completion_tokens)
        raise EngineStoppedError("the answer broke off; ask again")

    def _prompt(self, custom_id: str, body: ChatRequest | CompletionRequest) -> Work:
        defaults, limit = self._pipeline.defaults, self._engine.max_model_len
        if isinstance(body, ChatRequest):
            messages = [{"role": m.side, "content": m.text} for m in body.messages if is_visible(m.text)]
            token_ids = self._layout.chat_tokens(messages)
            max_tokens = body.max_completion_tokens or body.max_tokens or defaults.max_tokens
        else:
            token_ids = self._layout.text_tokens(body.prompt) if isinstance(body.prompt, str) else body.prompt
            max_tokens = body.max_tokens or defaults.max_tokens
        if len(token_ids) >= limit:
            raise ContextTooLongError(
                f"the prompt has {len(token_ids)} tokens; at most {limit - 1} fit into the model's context of {limit}, "
                "so that an answer has room",
                len(token_ids),
                limit - 1,
            )
        max_tokens = min(max_tokens, limit - len(token_ids))
        parts = tuple(self._parts(token_ids))
        run = partial(self._generate, isinstance(body, ChatRequest), token_ids, max_tokens, body.sampling(defaults))
        return Work(custom_id, Item(parts, len(token_ids), max_tokens), run)

    def _parts(self, token_ids: list[int]) -> list[Part]:
        return [(name, self._engine.block_size) for name in self._engine.block_hashes(token_ids, self._salt)]

    async def _generate(self, is_chat: bool, token_ids: list[int], max_tokens: int, sampling: Sampling) -> Outcome:
        engine = await self._pipeline.start()
        text, reason, num_generated, num_cached = "", "stop", 0, 0
        with self._pipeline.workspace.idle.answering():
            outputs = engine.generate(
                token_ids,
                max_tokens=max_tokens,
                salt=self._salt,
                prefix=PrefixUse("once"),
                **{**asdict(sampling), "stop": list(sampling.stop)},
            )
            async with aclosing(outputs):
                async for output in outputs:
                    text += output.text
                    num_generated += len(output.token_ids)
                    reason, num_cached = output.finish_reason or reason, output.num_cached_tokens or num_cached
        if reason not in ("stop", "length"):
            raise EngineStoppedError("vLLM gave up this request before its answer was complete; ask again")
        usage = {
            "prompt_tokens": len(token_ids),
            "completion_tokens": num_generated,
            "total_tokens": len(token_ids) + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        body = self._body(is_chat, text, reason, usage)
        return Outcome(body, len(token_ids), num_cached, num_generated)

    def _body(self, is_chat: bool, text: str, reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """Return OpenAI's response object."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if is_chat:
            prefix, kind = "chatcmpl", "chat.completion"
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            prefix, kind = "cmpl", "text_completion"
            choice["text"] = text
        head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self._model}
        return {**head, "choices": [choice], "usage": usage}
