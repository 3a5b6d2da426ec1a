"""One request being generated: its tokens as they come, and its answer when it has ended."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace

from ragkv.answer import Answer, AnswerOptions, Source, Timings, TokenOrigins
from ragkv.engine.engine import Engine, EngineOutput
from ragkv.engine.task import missing_kv
from ragkv.policies import FULL
from ragkv.routing import Request
from ragkv.token_origins import runs_of, usage_of


class Generation:
    """What vLLM has generated for a request so far. Times are in seconds of `time.perf_counter`.

    begun_at: when the question arrived. output: vLLM's last piece, with the worker's report once it has ended.
    """

    def __init__(self, request: Request, options: AnswerOptions, begun_at: float) -> None:
        self._request, self._options, self._begun_at = request, options, begun_at
        self._submitted_at, self._first_token_at = 0.0, 0.0
        self._texts: list[str] = []
        self.tokens: list[int] = []
        self.output = EngineOutput("", [])

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def unusable_chunks(self) -> list[str]:
        """The hashes of the chunks whose KV was missing or damaged."""
        return self.output.report.chunks.unusable if self.output.report else list(self._request.missing)

    async def run(self, engine: Engine) -> AsyncGenerator[str, None]:
        """Generate, and yield each piece of text. Closing the generator aborts the request."""
        request, options = self._request, self._options
        sampling = {**asdict(options.sampling), "stop": list(options.sampling.stop)}
        self._submitted_at = time.perf_counter()
        outputs = engine.generate(
            request.prompt.token_ids, request.task, max_tokens=options.max_tokens, salt=request.salt, **sampling
        )
        async with aclosing(outputs):
            async for output in outputs:
                if output.token_ids and not self.tokens:
                    self._first_token_at = time.perf_counter()
                self.output = output
                self.tokens += output.token_ids
                self._texts.append(output.text)
                if output.text:
                    yield output.text

    def answer(self, sources: list[Source], origins: TokenOrigins | None, unsupported: str | None) -> Answer:
        """Put the finished answer together. unsupported: why the model's KV can't be fused, None if it can."""
        request, now = self._request, time.perf_counter()
        missing = missing_kv(len(request.missing), len(request.requested.spans)) if request.missing else None
        answer = Answer(
            self.text,
            sources,
            request.policy,
            usage_of(request.prompt, self.output, len(self.tokens)),
            Timings(
                retrieve_ms=1e3 * (self._submitted_at - self._begun_at),
                ttft_ms=1e3 * (self._first_token_at - self._submitted_at) if self.tokens else 0.0,
                total_ms=1e3 * (now - self._begun_at),
            ),
            self.output.finish_reason or "abort",
            unsupported or missing,
            request.plan,
            origins,
        )
        return self._with_report(answer)

    def _with_report(self, answer: Answer) -> Answer:
        """Add what the worker reported: the policy really used, what kept KV from being reused, and the stages."""
        report = self.output.report
        if report is None:
            return answer if answer.fallback is None else replace(answer, policy=FULL)
        if report.failed:
            return replace(answer, policy=FULL, fallback=report.problem)
        stages = report.stages
        timings = replace(
            answer.timings, load_ms=stages.load_ms, probe_ms=stages.probe_ms, recompute_ms=stages.recompute_ms
        )
        return replace(answer, policy=report.policy or answer.policy, fallback=report.problem, timings=timings)


def origins_of(request: Request, output: EngineOutput, token_texts: list[str]) -> TokenOrigins:
    """Return where the KV of each prompt token came from, and which of the answer's sources the token belongs to."""
    positions = {hit.chunk.chunk_hash: i for i, hit in enumerate(request.fitted.question_hits)}
    return TokenOrigins(token_texts, runs_of(request.prompt, output, list(map(positions.get, request.chunk_hashes))))
