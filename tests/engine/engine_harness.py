"""Drives a real vLLM engine from synchronous tests. Knows nothing about what is tested."""

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest

from ragkv.config import ModelConfig
from ragkv.engine.connector import WorkerExtension
from ragkv.engine.engine import Engine
from ragkv.engine.task import ROOT_HASH, FuseTask, PrecomputeTask, PrefixUse, Report, Span
from ragkv.policies import Policy
from ragkv.retriever.hashing import chunk_hash

FINGERPRINT = "f" * 32
NUM_LAYERS = 6  # of the embedded model's 30, in the small one
CHUNK_TOKENS = 160
QUESTIONS = [
    "Which statement handles an exception?",
    "How is a class defined, and what is a metaclass?",
    "What does the assert statement do?",
    "How are the operands of a comparison evaluated?",
    "When is an attribute looked up in the class?",
    "What does the with statement call on exit?",
]
_salts = itertools.count()


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    report: Report | None = None
    num_resumed: int = 0

    def chosen_logprobs(self):
        return [step[token] for step, token in zip(self.logprobs, self.token_ids, strict=True)]


class Harness:
    """Synchronous tests on an asynchronous engine; its loop only runs inside `run`."""

    def __init__(self, runner, folder, store, dtype="float32", kernels="auto", preemption="auto", **engine_args):
        self.runner = runner
        arguments = {"max_logprobs": -1, **engine_args}
        config = ModelConfig(name=str(folder), dtype=dtype, kernels=kernels, kv_cache_gib=1, preemption=preemption)
        self.engine = self.run(Engine.start(folder, config, store, FINGERPRINT, **arguments))

    def run(self, coroutine):
        return self.runner.run(coroutine)

    async def ask(self, token_ids, task=None, max_tokens=8, salt=None, logprobs=1, keep="once"):
        result = Result()
        salt = salt or f"test-{next(_salts)}"
        pieces = self.engine.generate(
            token_ids,
            task,
            max_tokens=max_tokens,
            salt=salt,
            prefix=PrefixUse(keep),
            logprobs=logprobs,
            ignore_eos=True,
        )
        async for output in pieces:
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs or []
            result.report = output.report or result.report
            result.num_resumed += output.num_resumed_tokens
        return result

    def ask_now(self, *args, **kwargs):
        return self.run(self.ask(*args, **kwargs))

    def precompute(self, anchor, chunks):
        async def all_at_once():
            num_contexts = [
                self.engine.precompute(anchor, PrecomputeTask(Span(0, len(anchor), chunk_hash(anchor), ROOT_HASH)))
            ]
            for chunk in chunks:
                span = Span(len(anchor), len(anchor) + len(chunk), chunk_hash(chunk), chunk_hash(anchor))
                num_contexts.append(self.engine.precompute([*anchor, *chunk], PrecomputeTask(span)))
            await asyncio.gather(*num_contexts)

        self.run(all_at_once())

    def tell(self, method, *args):
        """Call a method of the worker's extension."""
        return self.run(self.engine._llm.collective_rpc(method, args=args))[0]

    def close(self):
        self.run(self.engine.close())


def assert_same(found, expected, tolerance=2e-3):
    assert found.token_ids == expected.token_ids
    assert found.chosen_logprobs() == pytest.approx(expected.chosen_logprobs(), abs=tolerance)


def lay_out(anchor, chunks, question, policy):
    """The prompt's token ids and the task that fuses it."""
    token_ids, anchor_hash = list(anchor), chunk_hash(anchor)
    spans = [Span(0, len(anchor), anchor_hash, ROOT_HASH)]
    for chunk in chunks:
        spans.append(Span(len(token_ids), len(token_ids) + len(chunk), chunk_hash(chunk), anchor_hash))
        token_ids += chunk
    return token_ids + list(question), FuseTask(tuple(spans), Policy.parse(policy))


class WorstChoice(WorkerExtension):
    """A worker whose `query` policy recomputes the tokens with the fewest votes."""

    def ragkv_attach(self):
        from ragkv.engine import fusion

        best = fusion.top_voted
        fusion.top_voted = lambda votes, eligible, num_tokens: best(-votes, eligible, num_tokens)
        return super().ragkv_attach()


class Switchable(WorkerExtension):
    """A worker that can be told to leave attention to vLLM, to slice its work, and to work in vLLM's blocks as on CUDA.

    It says where it attended.
    """

    def use_own_attention(self, wanted: bool):
        from ragkv.engine import fusion
        from ragkv.engine.blocks import pays

        fusion.pays = pays if wanted else lambda kernels, positions: False

    def use_slices_of(self, num_tokens: int | None):
        from ragkv.engine import worker

        slices = getattr(worker, "own_slice_tokens", worker.slice_tokens)
        worker.own_slice_tokens = slices
        worker.slice_tokens = slices if num_tokens is None else lambda *_: num_tokens

    def use_blocks_of_vllm(self, wanted: bool):
        from ragkv.engine.loader import KVLoader

        own = KVLoader.own_blocks = getattr(KVLoader, "own_blocks", KVLoader.blocks)
        KVLoader.blocks = (lambda loader, job: 2 * own(loader, job)[1:]) if wanted else own

    def places(self) -> list[str]:
        """Over what the passes since the last call attended by our kernel, one after the other."""
        from ragkv.engine import filler

        if not hasattr(filler, "own_selective"):
            filler.own_selective, filler.places = filler.selective, []
            filler.selective = lambda forward, kernels, blocks, positions: (
                filler.places.append(type(blocks).__name__) or filler.own_selective(forward, kernels, blocks, positions)
            )
        found, filler.places = filler.places, []
        return found
