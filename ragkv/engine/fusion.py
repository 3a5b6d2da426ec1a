"""Fuses chunks' KV into a request's paged cache.

The life of a fused request, in order: load every cached chunk's KV, layer by layer, inside the forward that runs the
tokens without cached KV (the question above all); let the policy choose cached tokens by what it observes there;
recompute those. `ragkv.engine.precompute` makes the KV at index time.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ragkv.engine.blocks import Blocks, pays
from ragkv.engine.filler import BlockFiller, PassPlan, piece
from ragkv.engine.loader import BadSpanError, KVLoader
from ragkv.engine.positions import covered, end_of_slice, exact_until, rows_in, runs_of
from ragkv.engine.probes import Deviations, Votes
from ragkv.engine.task import FuseTask, Job, Report, ScoreTask, Span, StageReport, TokenReport, missing_kv
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

_MOST_PROBED = 1024  # tokens, beside other requests: a probe isn't sliced, and they wait for its end
_KEEPS_PROBED = 0.25  # of the cached tokens: where no more are recomputed, the probe's KV before the last chunk stays
_LONG_BEGINNING = 64  # tokens before the first chunk: fewer are computed in the probe as soon as in a pass of their own


@dataclass
class StepBudget:
    """How much of a fusion is done in an engine step: about `slice_tokens` tokens. Set anew before each step.

    alone: no other request waits for the end of the step.
    """

    slice_tokens: int
    alone: bool = True


class Fusion:
    """Turns jobs into filled blocks. One for each worker; not thread-safe, like the model under it."""

    def __init__(self, loader: KVLoader) -> None:
        self._loader, self._forward = loader, loader.forward

    def fuse(self, job: Job, budget: StepBudget) -> Generator[None, None, Report]:
        """Fill the job's blocks; yields at each boundary of an engine step, returns the report.

        A chunk whose KV is missing or damaged is computed like any other text: that costs time, not correctness. If
        that turns out during a pass, everything is filled again without the chunk; the times of both attempts are
        reported.
        """
        assert isinstance(job.task, FuseTask)
        stages = StageReport(trace=[] if job.task.trace else None)
        report = Report(tokens=TokenReport(prefix=job.num_prefix), stages=stages)
        requested = job.task.spans if not job.task.policy.is_full else ()
        present = [span for span in requested if self._loader.has(span)]
        report.chunks.missing = len(requested) - len(present)
        report.chunks.unusable = [span.chunk_hash for span in requested if span not in present]
        self._loader.store.touch(map(self._loader.find, requested))
        in_memory = {span for span in present if self._loader.store.in_memory(self._loader.find(span))}
        while True:
            try:
                yield from _Attempt(self._loader, job, present, report).run(budget)
                break
            except BadSpanError as error:
                present = [span for span in present if span != error.span]
                report.chunks.corrupt += error.corrupt is not None
                report.chunks.missing += error.corrupt is None
                report.chunks.unusable.append(error.span.chunk_hash)
                logger.warning("%s; computed anew", error)
                self._loader.discard_if_corrupt(error)
            finally:
                self._loader.device_copy.release()
        report.tokens.loaded = [(span.start, span.end, span in in_memory) for span in present]
        report.memory.entered, report.memory.left = self._loader.store.memory_changes()
        num_unusable = report.chunks.missing + report.chunks.corrupt
        if num_unusable:
            report.problem = missing_kv(num_unusable, len(job.task.spans))
        return report

    def prefetch(self, job: Job) -> None:
        """Ask the system to read ahead the files that the job needs, while it waits for its turn."""
        task = job.task.fuse if isinstance(job.task, ScoreTask) else job.task
        assert isinstance(task, FuseTask)
        if not task.policy.is_full:
            with suppress(StoreError):  # reported when it is the job's turn
                self._loader.store.prefetch(map(self._loader.find, task.spans))

    def score(self, job: Job, budget: StepBudget) -> Generator[None, None, Report]:
        """Fuse the prompt, then run each continuation after it, with the prompt's last token first."""
        task = job.task
        assert isinstance(task, ScoreTask)
        prompt = job.token_ids[: task.num_prompt_tokens]
        report = yield from self.fuse(replace(job, task=task.fuse, token_ids=prompt), budget)
        for continuation in task.continuations:
            extended = replace(job, token_ids=[*prompt, *continuation])
            positions = torch.arange(len(prompt) - 1, len(extended.token_ids) - 1)
            report.logprobs.append(self._forward.logprobs([piece(extended, positions)]).cpu().numpy().tobytes())
        return report


class _Attempt:
    """One attempt to fuse a request from the spans whose KV the store reports; reading them may still fail."""

    def __init__(self, loader: KVLoader, job: Job, spans: Sequence[Span], report: Report) -> None:
        assert isinstance(job.task, FuseTask)
        self._loader, self._forward, self._spans = loader, loader.forward, spans
        self._report, self._policy = report, job.task.policy
        self._num_prefix = job.num_prefix
        self._filler = BlockFiller(loader, job, report)
        positions = torch.arange(len(job.token_ids))
        self._cached = covered(len(positions), positions[:0], spans)
        self._writable = positions[job.num_prefix :]  # not in vLLM's prefix cache
        self._uncached = self._writable[~self._cached[job.num_prefix :]]
        num_before = int((self._uncached < spans[0].start).sum()) if spans else 0
        num_before = num_before if num_before >= _LONG_BEGINNING else 0
        self._beginning = self._writable[:num_before]  # is computed first, and is then as a cached prefix
        self._writable, self._uncached = self._writable[num_before:], self._uncached[num_before:]
        self._eligible = self._cached.clone()
        self._exact_until = exact_until(spans, job.token_ids)
        self._eligible[: self._exact_until] = False
        self._num_loaded = 0  # of every span, so many of the first layers are in the blocks already

    def run(self, step: StepBudget) -> Generator[None, None, None]:
        policy = self._policy
        if not policy.pays(len(self._uncached), len(self._writable)):
            policy, self._report.problem = FULL, "less than half of the prompt is cached"
        elif policy.uses_votes and not step.alone and len(self._uncached) > _MOST_PROBED:
            problem = f"{len(self._uncached)} tokens without KV are too many to probe while others wait"
            policy, self._report.problem = FULL, problem
        self._report.policy = policy
        if policy.is_full or not self._spans:
            self._count(self._writable)
            everything = torch.cat([self._beginning, self._writable])
            yield from self._recompute(everything, (), step, shift=False)
            return
        yield from self._compute_beginning(step)
        if not policy.recomputes_some:
            self._count(self._uncached)
            attend_in = self._where_to_attend(self._uncached, self._spans)
            self._filler.run(PassPlan(self._uncached, self._all_spans, stage="probe_ms", attend_in=attend_in))
        else:
            chosen = self._choose(policy)
            selected = torch.cat([self._uncached, chosen[chosen >= self._num_prefix]]).sort().values
            self._count(selected)
            left = selected[~torch.isin(selected, self._filler.kept)]
            yield from self._recompute(left, self._spans, step, shift=policy.shift)

    def _compute_beginning(self, step: StepBudget) -> Generator[None, None, None]:
        """Compute a long text before the first chunk, exactly: from then on it is as what vLLM's prefix cache has."""
        if len(self._beginning):
            yield from self._recompute(self._beginning, (), step, shift=False)
            self._num_prefix = self._spans[0].start
            if not step.alone:
                yield

    def _count(self, computed: torch.Tensor) -> None:
        self._report.tokens.recomputed = len(self._beginning) + len(computed)
        self._report.tokens.reused = len(self._writable) - len(computed)
        self._report.tokens.recomputed_runs = runs_of(computed[self._cached[computed]])

    def _choose(self, policy: Policy) -> torch.Tensor:
        """Return the positions of the cached tokens to recompute, sorted."""
        num_tokens = int(policy.budget * int(self._cached.sum()))
        if policy.uses_votes:
            return self._choose_by_votes(policy, num_tokens)
        if policy.selection == Selection.EPIC:
            chunks = [(span.start, span.end) for span in self._spans if bool(self._eligible[span.start])]
            return chunk_heads(chunks, num_tokens)
        return self._choose_by_deviation(policy, num_tokens)

    def _choose_by_votes(self, policy: Policy, num_tokens: int) -> torch.Tensor:
        """Run the uncached tokens, the question above all, over the loaded KV, up to the last voting layer.

        Nothing is chosen if no text follows the chunks, for then nobody votes. The KV of what stands before the last
        chunk is kept: another pass would compute it anew over a cache of which few tokens have changed.
        """
        voters = (self._uncached >= self._spans[-1].end).nonzero().flatten()[-MAX_VOTERS:]
        if not len(voters):
            return self._uncached[:0]
        layers = voting_layers(len(self._forward.layers))
        votes = Votes(self._loader, self._uncached, voters, layers, len(self._cached), policy.weigh_by_std)
        attend_in = self._where_to_attend(self._uncached, self._spans)
        is_kept = not self._filler.is_transient(attend_in)
        plan = PassPlan(
            self._uncached, self._all_spans, votes.observe, stage="probe_ms", attend_in=attend_in, flush=is_kept
        )
        if policy.budget <= _KEEPS_PROBED:
            plan = replace(plan, keep=self._uncached[self._uncached < self._spans[-1].end])
        self._filler.run(plan)
        self._num_loaded = layers.stop if is_kept else 0
        attention, counts = votes.results()
        chosen = top_voted(counts, self._eligible, num_tokens)
        whole = float(attention[self._eligible].sum())
        self._report.votes.covered = float(attention[chosen].sum()) / whole if whole else None
        self._report.votes.evenness = evenness(attention, self._eligible)
        return chosen

    def _choose_by_deviation(self, policy: Policy, num_tokens: int) -> torch.Tensor:
        """Run all tokens through the first layers; in the gradual variant, those that are left through one layer more.

        Of the tokens computed at a layer, those stay whose K or V deviates most from the stored.
        """
        candidates = self._writable[self._cached[self._writable]]
        eligible = self._eligible
        last = len(self._forward.layers) - 1
        for layer, factor in GRADUAL if policy.selection == Selection.CACHEBLEND_GRADUAL else ((1, 1.0),):
            computed = torch.cat([self._uncached, candidates]).sort().values
            of_keys = policy.selection == Selection.CACHEBLEND_K
            probe = Deviations(self._loader, computed, min(layer, last), len(self._cached), of_keys=of_keys)
            self._filler.run(PassPlan(computed, self._all_spans, probe.observe, stage="probe_ms"))
            candidates = top_deviating(probe.deviations, eligible, int(factor * num_tokens))
            eligible = torch.zeros_like(eligible).index_fill_(0, candidates, True)
        return candidates

    def _recompute(
        self, selected: torch.Tensor, spans: Sequence[Span], step: StepBudget, *, shift: bool
    ) -> Generator[None, None, None]:
        """Recompute slices in order of position, each over the KV that the earlier ones left, like chunked prefill.

        A span is loaded with the first slice that reaches it: the layers that the probe hasn't loaded, or all layers if
        the span is shifted. A shift needs all recomputed tokens of a span at once, so no slice ends inside such a span.
        """
        any_spans, spans, done, num_loaded = bool(spans), list(spans), 0, self._num_loaded
        while done < len(selected):
            if done or (self._report.stages.probe_ms and not step.alone):  # the probe has used up this step
                yield
            end = min(len(selected), done + max(1, step.slice_tokens))
            if shift:
                end = end_of_slice(selected, end, spans)
            part = selected[done:end]
            bound = int(part[-1]) + 1 if end < len(selected) else len(self._cached)
            reached, spans = [s for s in spans if s.start < bound], [s for s in spans if s.start >= bound]
            attend_in = self._where_to_attend(part, reached) if any_spans else None
            reload_all = self._filler.is_transient(attend_in)
            whole = [s for s in reached if reload_all or (shift and len(rows_in(part, s)))]

            def spans_at(
                layer: int, reached: Sequence[Span] = reached, whole: Sequence[Span] = whole
            ) -> Sequence[Span]:
                return reached if layer >= num_loaded else whole

            self._filler.run(PassPlan(part, spans_at, shift=shift, attend_in=attend_in))
            done = end

    def _all_spans(self, _layer: int) -> Sequence[Span]:
        return self._spans

    def _where_to_attend(self, positions: torch.Tensor, spans: Sequence[Span]) -> Blocks | None:
        """Return blocks that have K and V of all tokens up to these, for our attention kernel.

        None: vLLM's own attention is used.
        """
        filler, kernels = self._filler, self._loader.kernels
        if not (len(positions) and self._loader.can_attend and pays(kernels, positions)):
            return None
        if filler.is_separate:
            has_fused_prefix = self._num_prefix > self._exact_until  # from another fusion, in vLLM's cache only
            known = covered(len(self._cached), positions, spans)
            known[filler.kept] = True
            known = known[: int(positions[-1]) + 1]
            if has_fused_prefix or not bool(known.all()):
                return filler.paged
        return filler.blocks
