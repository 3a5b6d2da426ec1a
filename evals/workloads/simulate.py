"""`ragkv eval simulate`: hit rates, TTFT and bytes of many engines, by the number of engines and chunks, and the store.

Traces are questions about documents whose popularity follows Zipf's law, and files like Mooncake's, whose prompts share
prefixes. Times are those of a measured profile. What is simulated, and what is simpler than in the product:
`ragkv.evals.simulation`.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ragkv import models
from ragkv.batch.sharing import Part
from ragkv.config import Config
from ragkv.controller.cost_model import Profile
from ragkv.controller.profile_file import ProfileFile
from ragkv.errors import ConfigError
from ragkv.evals.arrivals import gaps
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.simulation import TIERS, Answered, Request, Simulation, System
from ragkv.evals.workloads.cache import ANCHOR_TOKENS, BLOCK_TOKENS, LOG_TOKENS, MOVED, TOKENS, each_line
from ragkv.home import Home
from ragkv.policies import Policy, Selection
from ragkv.store.codecs import CODECS
from ragkv.store.entries import entry_bytes
from ragkv.store.record import Header

if TYPE_CHECKING:
    from ragkv.engine.task import FuseTask
    from ragkv.evals.parameters import Simulate

ZIPF = "zipf"
BUCKET, AFFINE = "bucket", "affine"  # a store, a routing
_QUESTION_TOKENS = 48
_MOVES = 10  # how often popularity moves in a run
_SPARE = 3  # times as many chunks are drawn as a question gets, which are all different


@dataclass(frozen=True)
class Trace:
    """Requests with their natural times. sizes: tokens of all chunks by key, of documents; else None."""

    name: str
    num_chunks: int
    requests: Sequence[Request]
    sizes: npt.NDArray[np.int16] | None = None

    @property
    def is_exact(self) -> bool:
        return self.sizes is None

    def under(self, load: float, num_engines: int, profile: Profile) -> Iterator[Request]:
        """Yield the requests as they arrive. load: how much of all engines' time it would take to prefill every prompt
        in full; 0: as the trace has it."""
        if not load:
            return iter(self.requests)
        work_s = 1e-3 * sum(profile.prefill_ms(request.num_tokens) for request in self.requests)
        factor = work_s / (load * num_engines * max(1e-9, self.requests[-1].arrived_s))
        return (replace(request, arrived_s=factor * request.arrived_s) for request in self.requests)


def run(config: Config, wanted: "Simulate", progress: Progress) -> Iterator[Row]:
    """Yield a row for each number of chunks and engines, each store and each way to choose an engine.

    Raises ConfigError without a profile, or for a trace that can't be read.
    """
    is_exact = wanted.trace != ZIPF
    _check(wanted, is_exact=is_exact)
    profile = profile_of(config, wanted.profile)
    system = system_of(config, wanted, profile, is_exact=is_exact)
    of_file = blocks(Path(wanted.trace)) if is_exact else None
    for num_chunks in [of_file.num_chunks] if of_file else wanted.chunks:
        for num_engines in wanted.engines:
            progress.update(f"{num_engines:,} engines, {num_chunks:,} chunks")
            trace = of_file or questions(num_chunks, wanted.requests * num_engines, wanted)
            for store, routing in itertools.product(wanted.stores, wanted.routings):
                bytes_s = wanted.bucket_mib_s * (1 << 20) if store == BUCKET else None
                chosen = replace(system, num_engines=num_engines, is_affine=routing == AFFINE, bucket_bytes_s=bytes_s)
                yield {
                    "trace": trace.name,
                    "chunks": num_chunks,
                    "engines": num_engines,
                    "store": store,
                    "routing": routing,
                    "load": wanted.load,
                    **simulated(chosen, trace, wanted.load, wanted.uncounted),
                }


def simulated(system: System, trace: Trace, load: float, uncounted: float) -> Row:
    """Return what becomes of a trace. uncounted: the share of its requests, the first ones, that warm the stores up."""
    simulation = Simulation(system)
    if system.is_indexed and trace.sizes is not None and system.disk_bytes is not None and not system.bucket_bytes_s:
        simulation.index(_last_that_fit(trace.sizes, system.kv_bytes, system.disk_bytes))
    answers = sorted(
        simulation.run(trace.under(load, system.num_engines, system.profile)), key=lambda each: each.arrived_s
    )
    return {**summary(answers[int(uncounted * len(answers)) :]), **_held(simulation, trace)}


def summary(answers: Sequence[Answered]) -> Row:
    """Return what a client and an operator would see. Hit rates are shares of the chunks' tokens."""
    tokens = np.sum([each.tokens for each in answers], axis=0)
    shares = tokens / max(1, tokens.sum())
    begin_s = answers[0].arrived_s
    arriving_s = answers[-1].arrived_s - begin_s
    answering_s = max(each.ended_s for each in answers) - begin_s
    ttfts = np.percentile([each.ttft_ms for each in answers], (50, 90, 99))
    return {
        "requests": len(answers),
        "arriving_per_s": _rate(len(answers), arriving_s),
        "answered_per_s": _rate(len(answers), answering_s),
        **{f"{tier}_share": round(float(share), 4) for tier, share in zip(TIERS, shares, strict=True)},
        "prefill_share": round(sum(each.way == "prefill" for each in answers) / len(answers), 4),
        **{f"ttft_p{q}_ms": round(float(ms), 1) for q, ms in zip((50, 90, 99), ttfts, strict=True)},
        "disk_read_bytes": sum(each.disk_bytes for each in answers),
        "bucket_read_bytes": sum(each.bucket_bytes for each in answers),
    }


def questions(num_chunks: int, num_requests: int, wanted: "Simulate") -> Trace:
    """Return questions about documents of a chunk each, whose popularity follows Zipf's law, and moves.

    Arrivals are a Poisson process. Chunks of one question are different; where few are popular it may have fewer.
    """
    rng = np.random.default_rng((wanted.seed, num_chunks))
    sizes = np.clip(np.rint(rng.lognormal(*LOG_TOKENS, num_chunks)), *TOKENS).astype(np.int16)
    cumulative = np.cumsum(np.arange(1, num_chunks + 1, dtype=np.float64) ** -wanted.exponent)
    documents = rng.permutation(num_chunks).astype(np.int32)  # by their rank
    times = itertools.accumulate(gaps(num_requests, 1.0, wanted.seed))
    requests = []
    for part, numbers in enumerate(np.array_split(np.arange(num_requests), _MOVES)):
        if part:
            moved = rng.choice(num_chunks, num_chunks // MOVED, replace=False)
            documents[moved] = documents[rng.permutation(moved)]
        drawn = rng.random((len(numbers), _SPARE * wanted.top_k)) * cumulative[-1]
        ranks = np.minimum(np.searchsorted(cumulative, drawn, side="right"), num_chunks - 1)
        keys, tokens = documents[ranks].tolist(), sizes[documents[ranks]].tolist()
        for each, their_tokens, arrived_s in zip(keys, tokens, times, strict=False):
            chunks = itertools.islice(dict(zip(each, their_tokens, strict=True)).items(), wanted.top_k)
            requests.append(Request(arrived_s, tuple(chunks), _QUESTION_TOKENS, wanted.tokens, ANCHOR_TOKENS))
    return Trace(ZIPF, num_chunks, requests, sizes)


def blocks(file: Path) -> Trace:
    """Return the requests of a trace like Mooncake's: full blocks of a prefix, and the rest, a token at least."""

    def request(line: dict[str, Any]) -> Request:
        length = int(line["input_length"])
        chunks = tuple((int(block), BLOCK_TOKENS) for block in line["hash_ids"][: (length - 1) // BLOCK_TOKENS])
        rest = length - BLOCK_TOKENS * len(chunks)
        return Request(1e-3 * line["timestamp"], chunks, rest, int(line["output_length"]), is_exact=True)

    requests = each_line(file, request)
    if not requests:
        raise ConfigError(f"the trace {file} has no requests")
    distinct = {key for each in requests for key, _ in each.chunks}
    return Trace(file.stem, len(distinct), sorted(requests, key=lambda each: each.arrived_s))


def of_tasks(prompts: Iterable[tuple[int, "FuseTask"]], pauses: Iterable[float], answer_tokens: int) -> list[Request]:
    """Return real requests as simulated ones.

    prompts: the number of tokens of each, and its task, whose span at the prompt's start is the anchor. pauses: before
    each, in seconds. A chunk's key says which of its entries is used: its mean, or its KV after the anchor alone.
    """
    requests = []
    for (num_tokens, task), arrived_s in zip(prompts, itertools.accumulate(pauses), strict=True):
        sizes = {(s.chunk_hash, s.mean_hash or s.anchor_hash): s.end - s.start for s in task.spans if s.start > 0}
        anchor = sum(span.end - span.start for span in task.spans if span.start == 0)
        rest = num_tokens - anchor - sum(sizes.values())
        requests.append(Request(arrived_s, tuple(sizes.items()), rest, answer_tokens, anchor))
    return requests


def system_of(config: Config, wanted: "Simulate", profile: Profile, *, is_exact: bool) -> System:
    """Return the engines that the configuration describes. Exact prefixes are stored unchanged, and nothing of them is
    recomputed; those unused longest go first (`ragkv.store.prefixes`).

    Raises ConfigError for a profile of another policy.
    """
    policy = Policy(Selection.NONE) if is_exact else Policy.of(config.answer.policy, config.answer.budget)
    if not is_exact and not policy.is_like(profile.policy):
        raise ConfigError(
            f"the profile is of the policy {profile.policy.name}, not of {policy.name}: set answer.policy "
            "(RAGKV_ANSWER__POLICY), or measure with `ragkv profile`"
        )
    kv_bytes = wanted.kv_bytes or kv_bytes_of(config, "raw" if is_exact else config.store.codec)
    kv_tokens = wanted.kv_tokens or int(config.model.kv_cache_gib * (1 << 30) / kv_bytes_of(config, "raw"))
    return System(
        num_engines=1,
        profile=profile,
        policy=policy,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        memory_bytes=round(config.store.memory_gib * (1 << 30)),
        disk_bytes=config.store.disk_bytes,
        token_s=1e-3 * wanted.token_ms,
        eviction="lru" if is_exact else config.store.eviction,
        bucket_latency_s=1e-3 * wanted.bucket_ms,
        is_indexed=wanted.indexed,
    )


def kv_bytes_of(config: Config, codec: str, num_tokens: int = 512) -> int:
    """Return the bytes that a token's KV takes in an entry of so many, by the model's config.json. What means have
    beside their KV (v_std, differences) isn't counted. Raises ConfigError for a config.json that doesn't tell."""
    folder = models.resolve(config.model.name, config.home)
    fields = json.loads((folder / "config.json").read_bytes())
    fields = fields.get("text_config") or fields
    try:
        heads = fields.get("num_key_value_heads") or fields["num_attention_heads"]
        size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        num_layers = fields["num_hidden_layers"]
    except KeyError as error:
        raise ConfigError(
            f"{folder / 'config.json'} has no {error}, so that the size of a token's KV isn't known: give --kv-bytes "
            "and --kv-tokens"
        ) from error
    shape = (heads, num_tokens, size)
    record = Header(CODECS[codec].of(is_mean=True), getattr(torch, config.model.dtype), shape, 0, False, 0).length
    return math.ceil(entry_bytes([record] * num_layers) / num_tokens)


def profile_of(config: Config, file: Path | None) -> Profile:
    """Return the profile in a file that `ragkv profile --json` wrote, or the home's own.

    Raises ConfigError if there is none.
    """
    policy = Policy.of(config.answer.policy, config.answer.budget)
    if file is not None:
        return _read_profile(file, policy)
    fingerprint = models.model_fingerprint(
        models.resolve(config.model.name, config.home), config.model.dtype, config.home
    )
    found = ProfileFile(Home(config.home).profiles, fingerprint, config.store.codec, policy).load()
    if found is None:
        raise ConfigError(
            f"{config.home} has no profile of this machine, model, codec and policy: measure one with `ragkv profile`, "
            "or give --profile FILE, which `ragkv profile --json` prints"
        )
    return found


def _read_profile(file: Path, policy: Policy) -> Profile:
    """Read one profile, or a home's profile.json, if it has just one of this policy."""
    try:
        fields = json.loads(file.read_text())
        profiles = [Profile.from_dict(each) for each in ([fields] if "policy" in fields else fields.values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"can't read a profile from {file}: {error!r}; `ragkv profile --json` prints one") from error
    if len(profiles) > 1:
        profiles = [each for each in profiles if each.policy.is_like(policy)]
    if len(profiles) != 1:
        raise ConfigError(
            f"{file} has {len(profiles)} profiles of the policy {policy.name}, not one: give the one that "
            "`ragkv profile --json` prints"
        )
    return profiles[0]


def _check(wanted: "Simulate", *, is_exact: bool) -> None:
    if not is_exact and not wanted.load:
        raise ConfigError("questions about documents have no times of their own: give a --load above 0")
    if is_exact and wanted.indexed:
        raise ConfigError("--indexed is for documents: prefixes are stored only once they have been computed")


def _last_that_fit(sizes: npt.NDArray[np.int16], kv_bytes: int, disk_bytes: int) -> Iterator[Part]:
    """Yield the chunks that are on a disk after all were indexed: of those that nobody has used, the last ones."""
    ends = np.cumsum(sizes[::-1], dtype=np.int64) * kv_bytes
    first = len(sizes) - int(np.searchsorted(ends, disk_bytes, side="right"))
    return zip(range(first, len(sizes)), sizes[first:].tolist(), strict=True)


def _held(simulation: Simulation, trace: Trace) -> Row:
    """Return the bytes that all engines hold in the end, and the bucket."""
    system, engines = simulation.system, simulation.engines
    held = {
        "memory_bytes": sum(engine.memory.size_bytes for engine in engines),
        "disk_bytes": sum(engine.disk.size_bytes for engine in engines),
        "bucket_bytes": simulation.bucket.size_bytes,
    }
    if system.is_indexed and trace.sizes is not None:
        everything = int(trace.sizes.sum(dtype=np.int64)) * system.kv_bytes
        if system.bucket_bytes_s is not None:
            held["bucket_bytes"] = everything
        elif system.disk_bytes is None:
            held["disk_bytes"] = everything * len(engines)
    return held


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds else 0.0
