"""Fuses chunks' KV into a request's paged cache.

The life of a fused request, in order: load every cached chunk's KV, layer by layer, inside the forward that runs the
tokens without cached KV (the question above all); let the policy choose cached tokens by what it sees in passing;
recompute those. What is precomputed at index time: `ragkv.engine.precompute`.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ragkv.engine.attention import pays
from ragkv.engine.blocks import Blocks
from ragkv.engine.loader import BadSpanError, BlockFiller, Source, covered, piece, rows_in
from ragkv.engine.probes import Deviations, Votes
from ragkv.engine.task import ROOT_HASH, FuseTask, Job, Report, ScoreTask, Span, missing_kv
from ragkv.errors import StoreError
from ragkv.policies import (
    FULL,
    GRADUAL,
    MAX_VOTERS,
    Policy,
    Selection,
    chunk_heads,
    evenness,
    top_deviating,
    top_voted,
    voting_layers,
)

logger = logging.getLogger(__name__)


@dataclass
class StepBudget:
    """How much of a fusion is done in an engine step: about `slice_tokens` tokens. alone: nobody waits for the end of
    the step. Changes from step to step."""

    slice_tokens: int
    alone: bool = True


class Fusion:
    """Turns jobs into filled blocks. One for each worker; not thread-safe, like the model under it."""

    def __init__(self, source: Source) -> None:
        self.source, self.subset = source, source.subset

    def fuse(self, job: Job, budget: StepBudget) -> Generator[None, None, Report]:
        """Fill the job's blocks; yields where an engine step is to end, returns the report.

        A chunk whose KV is missing or damaged is computed like any other text: that costs time, not correctness.
        """
        assert isinstance(job.task, FuseTask)
        report = Report(prefix_tokens=job.num_prefix, trace=[] if job.task.trace else None)
        wanted = job.task.spans if not job.task.policy.is_full else ()
        present = [span for span in wanted if self.source.store.contains(self.source.key(span))]
        report.missing_chunks = len(wanted) - len(present)
        report.unusable_chunks = [span.chunk_hash for span in wanted if span not in present]
        self.source.store.touch(map(self.source.key, wanted))
        in_memory = {span for span in present if self.source.store.in_memory(self.source.key(span))}
        while True:
            try:
                yield from _Request(self.source, job, present, report).run(budget)
                break
            except BadSpanError as error:
                present = [span for span in present if span != error.span]
                report.corrupt_chunks += error.is_corrupt
                report.missing_chunks += not error.is_corrupt
                report.unusable_chunks.append(error.span.chunk_hash)
                logger.warning("%s; computed anew", error)
                self.source.discard_if_corrupt(error)
        report.loaded = [(span.start, span.end, span in in_memory) for span in present]
        report.entered_memory, report.left_memory = self.source.store.memory_changes()
        num_unusable = report.missing_chunks + report.corrupt_chunks
        if num_unusable:
            report.problem = missing_kv(num_unusable, len(job.task.spans))
        elif report.policy != job.task.policy.label:
            report.problem = "less than half of the prompt is cached"
        return report

    def prefetch(self, job: Job) -> None:
        """Have what the job is going to read brought into the page cache while it waits for its turn."""
        task = job.task.fuse if isinstance(job.task, ScoreTask) else job.task
        assert isinstance(task, FuseTask)
        if not task.policy.is_full:
            with suppress(StoreError):  # said when it is the job's turn
                self.source.store.prefetch(map(self.source.key, task.spans))

    def score(self, job: Job, budget: StepBudget) -> Generator[None, None, Report]:
        """Fuse the prompt proper, then run each continuation behind it."""
        task = job.task
        assert isinstance(task, ScoreTask)
        prompt = job.token_ids[: task.num_prompt_tokens]
        report = yield from self.fuse(replace(job, task=task.fuse, token_ids=prompt), budget)
        for continuation in task.continuations:
            behind = replace(job, token_ids=[*prompt, *continuation])
            positions = torch.arange(len(prompt) - 1, len(behind.token_ids) - 1)
            report.logprobs.append(self.subset.logprobs([piece(behind, positions)]).cpu().numpy().tobytes())
        return report


class _Request:
    """One attempt to fuse a request from the spans whose KV seems to be there."""

    def __init__(self, source: Source, job: Job, spans: Sequence[Span], report: Report) -> None:
        assert isinstance(job.task, FuseTask)
        self._source, self._subset, self._spans = source, source.subset, spans
        self._report, self._policy = report, job.task.policy
        self._num_prefix = job.num_prefix
        self._fill = BlockFiller(source, job, report)
        positions = torch.arange(len(job.token_ids))
        self._cached = torch.zeros(len(positions), dtype=torch.bool)
        for span in spans:
            self._cached[span.start : span.end] = True
        self._writable = positions[job.num_prefix :]
        self._uncached = self._writable[~self._cached[job.num_prefix :]]
        self._eligible = self._cached.clone()
        self._exact_until = _exact_until(spans)
        self._eligible[: self._exact_until] = False
        self._num_loaded = 0  # layers of every span that are in the blocks

    def run(self, budget: StepBudget) -> Generator[None, None, None]:
        policy = self._policy
        if not policy.pays(len(self._uncached), len(self._writable)):
            policy = FULL
        self._report.policy = policy.label
        if policy.is_full or not self._spans:
            yield from self._recompute_all(budget)
        elif not policy.recomputes_some:
            self._count(self._uncached)
            over = self._over(self._uncached, self._spans)
            self._fill.run(self._uncached, self._all_spans, stage="probe_ms", over=over)
        else:
            chosen = self._choose(policy)
            selected = torch.cat([self._uncached, chosen[chosen >= self._num_prefix]]).sort().values
            self._count(selected)
            yield from self._recompute(selected, self._spans, budget, shift=policy.shift)

    def _recompute_all(self, budget: StepBudget) -> Generator[None, None, None]:
        self._count(self._writable)
        yield from self._recompute(self._writable, (), budget, shift=False)

    def _count(self, computed: torch.Tensor) -> None:
        self._report.recomputed_tokens = len(computed)
        self._report.reused_tokens = len(self._writable) - len(computed)
        self._report.recomputed_runs = _as_runs(computed[self._cached[computed]])

    def _choose(self, policy: Policy) -> torch.Tensor:
        """Positions of cached tokens, sorted."""
        budget = int(policy.budget * int(self._cached.sum()))
        if policy.uses_votes:
            return self._choose_by_votes(policy, budget)
        if policy.uses_deviations:
            return self._choose_by_deviation(policy, budget)
        chunks = [(span.start, span.end) for span in self._spans if bool(self._eligible[span.start])]
        return chunk_heads(chunks, budget)

    def _choose_by_votes(self, policy: Policy, budget: int) -> torch.Tensor:
        """Run the uncached tokens, the question above all, over the stale cache; loads the layers that it reaches."""
        voters = (self._uncached >= self._spans[-1].end).nonzero().flatten()[-MAX_VOTERS:]
        if not len(voters):
            return self._uncached[:0]
        layers = voting_layers(len(self._subset.layers))
        ballot = Votes(self._source, self._uncached, voters, layers, len(self._cached), policy.weigh_by_std)
        over = self._over(self._uncached, self._spans)
        kept = not self._fill.is_passing(over)
        self._fill.run(self._uncached, self._all_spans, ballot.see, stage="probe_ms", over=over, flush=kept)
        self._num_loaded = layers.stop if kept else 0
        attention, votes = ballot.results()
        chosen = top_voted(votes, self._eligible, budget)
        whole = float(attention[self._eligible].sum())
        self._report.covered = float(attention[chosen].sum()) / whole if whole else None
        self._report.evenness = evenness(attention, self._eligible)
        return chosen

    def _choose_by_deviation(self, policy: Policy, budget: int) -> torch.Tensor:
        """Run everything through the layers below the one that is looked at; gradually: then only what was chosen."""
        candidates = self._writable[self._cached[self._writable]]
        eligible = self._eligible
        last = len(self._subset.layers) - 1
        for layer, factor in GRADUAL if policy.selection == Selection.CACHEBLEND_GRADUAL else ((1, 1.0),):
            computed = torch.cat([self._uncached, candidates]).sort().values
            of_keys = policy.selection == Selection.CACHEBLEND_K
            probe = Deviations(self._source, computed, min(layer, last), len(self._cached), of_keys=of_keys)
            self._fill.run(computed, self._all_spans, probe.see, stage="probe_ms")
            candidates = top_deviating(probe.deviations, eligible, int(factor * budget))
            eligible = torch.zeros_like(eligible).index_fill_(0, candidates, True)
        return candidates

    def _recompute(
        self, selected: torch.Tensor, spans: Sequence[Span], budget: StepBudget, *, shift: bool
    ) -> Generator[None, None, None]:
        """Slices in order of position, each over the KV that the earlier ones left: exact, like chunked prefill.

        A span is loaded with the first slice that reaches it: the layers that no earlier pass has loaded, or all of
        them if it shifts. A shift needs all recomputed tokens of a span at once, so there no slice ends in a span.
        """
        any_spans, spans, done, num_loaded = bool(spans), list(spans), 0, self._num_loaded
        while done < len(selected):
            if done or (self._report.probe_ms and not budget.alone):  # the probe was enough for one step
                yield
            end = min(len(selected), done + max(1, budget.slice_tokens))
            if shift:
                end = _past_span(selected, end, spans)
            part = selected[done:end]
            bound = int(part[-1]) + 1 if end < len(selected) else len(self._cached)
            reached, spans = [s for s in spans if s.start < bound], [s for s in spans if s.start >= bound]
            over = self._over(part, reached) if any_spans else None
            anew = self._fill.is_passing(over)
            moved = [s for s in reached if anew or (shift and len(rows_in(part, s)))]

            def spans_at(
                layer: int, reached: Sequence[Span] = reached, moved: Sequence[Span] = moved
            ) -> Sequence[Span]:
                return reached if layer >= num_loaded else moved

            self._fill.run(part, spans_at, shift=shift, over=over)
            done = end

    def _all_spans(self, _layer: int) -> Sequence[Span]:
        return self._spans

    def _over(self, positions: torch.Tensor, spans: Sequence[Span]) -> Blocks | None:
        """Where these attend by our kernel: K and V of all tokens before them are there. None: by vLLM's."""
        fill, kernels = self._fill, self._source.kernels
        if not (len(positions) and self._source.can_attend and pays(kernels, positions)):
            return None
        if fill.is_apart:
            of_vllm = self._num_prefix > self._exact_until  # its cache has what another fusion made of these
            known = covered(len(self._cached), positions, spans)[: int(positions[-1]) + 1]
            if of_vllm or not bool(known.all()):
                return fill.in_place
        return fill.blocks


def _past_span(selected: torch.Tensor, end: int, spans: Sequence[Span]) -> int:
    """The first index from `end` on that cuts no span's selected tokens in two."""
    for span in spans:
        inside = rows_in(selected, span)
        if len(inside) and int(inside[0]) < end <= int(inside[-1]):
            return int(inside[-1]) + 1
    return end


def _exact_until(spans: Sequence[Span]) -> int:
    """Where exactness ends: the KV of a span is what prefill computes if it comes after what it was precomputed after,
    as the anchor does, and a chunk directly behind it."""
    end, before = 0, ROOT_HASH
    for span in spans[:2]:
        if span.start != end or span.anchor_hash != before:
            break
        end, before = span.end, span.chunk_hash
    return end


def _as_runs(positions: torch.Tensor) -> list[tuple[int, int]]:
    if not len(positions):
        return []
    breaks = (torch.diff(positions) != 1).nonzero().flatten() + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(positions, breaks.tolist())]
