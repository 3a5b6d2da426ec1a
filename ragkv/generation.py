"""One request being generated: its tokens as they come, and its answer when it has ended."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from itertools import groupby

from ragkv.answer import (
    Answer,
    AnswerOptions,
    Delta,
    Kind,
    Reasoning,
    Run,
    Source,
    Timings,
    TokenOrigins,
    Usage,
)
from ragkv.engine.engine import Engine, EngineOutput
from ragkv.engine.task import StageReport, TokenReport, missing_kv
from ragkv.policies import FULL
from ragkv.prompt import Prompt
from ragkv.quality_target import NUM_LOGPROBS
from ragkv.reasoning import ReasoningSplitter
from ragkv.routing import Request


class Generation:
    """What vLLM has generated for a request so far. Times are in seconds of `time.perf_counter`.

    begun_at: when the question arrived. output: vLLM's last piece, with the worker's report once it has ended.
    drift_estimate: in nats, None where none was asked for. logprobs: of each token's likeliest alternatives, kept only
    for the estimate.
    """

    def __init__(
        self, request: Request, options: AnswerOptions, begun_at: float, rejected: "Generation | None" = None
    ) -> None:
        """rejected: the generation for the same question that this one takes the place of."""
        self.request, self._options, self._begun_at = request, options, begun_at
        self._submitted_at: float = rejected._submitted_at if rejected else 0.0
        self._first_token_at = 0.0
        self._attempts: int = rejected._attempts + 1 if rejected else 1
        self.text = self.reasoning = ""
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.drift_estimate: float | None = None
        self.output = EngineOutput("", [])

    @property
    def unusable_chunks(self) -> list[str]:
        """The hashes of the chunks whose KV was missing or damaged."""
        return self.output.report.chunks.unusable if self.output.report else list(self.request.missing)

    async def run(self, engine: Engine) -> AsyncGenerator[str, None]:
        """Generate, and yield each piece of text. Closing the generator aborts the request."""
        request, options = self.request, self._options
        sampling = {**asdict(options.sampling), "stop": list(options.sampling.stop)}
        if options.max_drift is not None:
            sampling["logprobs"] = NUM_LOGPROBS
        self._submitted_at = self._submitted_at or time.perf_counter()
        outputs = engine.generate(
            request.prompt.token_ids,
            request.task,
            max_tokens=options.max_tokens,
            salt=request.salt,
            prefix=request.prefix,
            **sampling,
        )
        async with aclosing(outputs):
            async for output in outputs:
                if output.token_ids and not self.tokens:
                    self._first_token_at = time.perf_counter()
                self.output = output
                self.tokens += output.token_ids
                self.logprobs += output.logprobs or []
                if output.text:
                    yield output.text

    async def events(self, texts: AsyncGenerator[str, None]) -> AsyncGenerator[Reasoning | Delta, None]:
        """Yield the texts of `run`, as far as they are let through, as the model's reasoning and its answer."""
        splitter = ReasoningSplitter(is_open=self.request.prompt.ends_in_reasoning)
        async with aclosing(texts):
            async for text in texts:
                for event in splitter.feed(text):
                    yield self._said(event)
        for event in splitter.end():
            yield self._said(event)

    def _said(self, event: Reasoning | Delta) -> Reasoning | Delta:
        if isinstance(event, Delta):
            self.text += event.text
        else:
            self.reasoning += event.text
        return event

    def released(self) -> None:
        """Note that the answer's first text, which was held back, goes out now: its TTFT ends here."""
        self._first_token_at = time.perf_counter()

    def answer(self, sources: list[Source], origins: TokenOrigins | None, unsupported: str | None) -> Answer:
        """Put the finished answer together. unsupported: why the model's KV can't be fused, None if it can."""
        request, report, now = self.request, self.output.report, time.perf_counter()
        missing = missing_kv(len(request.missing), len(request.requested.spans)) if request.missing else None
        fallback = report.problem if report else unsupported or missing
        policy = (report and report.policy) or request.policy
        stages = report.stages if report and not report.failed else StageReport()
        return Answer(
            self.text,
            sources,
            FULL if (report.failed if report else fallback) else policy,
            _usage(request.prompt, self.output, len(self.tokens)),
            Timings(
                retrieve_ms=1e3 * (self._submitted_at - self._begun_at),
                load_ms=stages.load_ms + stages.prefix_ms,
                probe_ms=stages.probe_ms,
                recompute_ms=stages.recompute_ms,
                ttft_ms=1e3 * (self._first_token_at - self._submitted_at) if self.tokens else 0.0,
                total_ms=1e3 * (now - self._begun_at),
            ),
            "length" if self.output.finish_reason == "length" else "stop",
            fallback,
            request.plan,
            origins,
            self.drift_estimate,
            self._attempts,
            self.reasoning,
        )


def _usage(prompt: Prompt, output: EngineOutput, num_completion_tokens: int) -> Usage:
    """Count the tokens of a request. vLLM itself computes the prompt's last one, whatever was fused before it."""
    num_tokens, report = len(prompt.token_ids), output.report
    if report is None or report.failed:
        prefix = 0 if report else output.num_cached_tokens
        return Usage(num_tokens, prefix, 0, num_tokens - prefix, num_completion_tokens)
    tokens = report.tokens
    memory = sum(end - start for start, end, in_memory in tokens.loaded if in_memory)
    prefix = tokens.prefix + tokens.exact
    recomputed = num_tokens - prefix if report.policy is None else tokens.recomputed + 1
    return Usage(num_tokens, prefix, tokens.reused, recomputed, num_completion_tokens, memory, tokens.exact)


def origins_of(request: Request, output: EngineOutput, token_texts: list[str]) -> TokenOrigins:
    """Return where the KV of each prompt token came from, and which of the answer's sources the token belongs to."""
    num_tokens, report = len(request.prompt.token_ids), output.report
    kinds: list[Kind] = ["computed"] * num_tokens
    belongs: list[int | None] = [None] * num_tokens
    sources = {hit.chunk.chunk_hash: i for i, hit in enumerate(request.fitted.question_hits)}
    for (start, end), chunk_hash in zip(request.prompt.chunk_ranges, request.chunk_hashes, strict=True):
        belongs[start:end] = [sources.get(chunk_hash)] * (end - start)
    fused = report.tokens if report and not report.failed else TokenReport()
    for start, end, in_memory in fused.loaded:
        kinds[start:end] = ["memory" if in_memory else "disk"] * (end - start)
    for start, end in fused.recomputed_runs:
        kinds[start:end] = ["recomputed"] * (end - start)
    num_prefix = fused.prefix + fused.exact if report else output.num_cached_tokens
    kinds[:num_prefix] = ["prefix"] * num_prefix
    kinds[num_prefix - fused.exact : num_prefix] = ["stored"] * fused.exact
    kinds[-1] = "computed"
    runs, start = [], 0
    for (kind, source), tokens in groupby(zip(kinds, belongs, strict=True)):
        end = start + len(list(tokens))
        runs.append(Run(start, end, kind, source))
        start = end
    return TokenOrigins(token_texts, runs)
