"""A simulation of engines that serve requests with stored KV, for what one machine can't hold.

What is kept, how a request is answered and what it waits for is decided by the product's own code: `Eviction`, `plan`,
`longest_wait_s` and `Admission`, and how long it takes by a measured `Profile`. Knows nothing of traces.

What is simpler than in the product:
- Prompts are prefilled or fused one at a time, first come, first served. Answers are decoded beside that, all together
  a token in a given time, however many they are: a prompt waits for that once in each of its engine steps, and they
  wait for the prompt.
- Storing costs nothing: a chunk that had no KV is in memory, on the disk and in the bucket as soon as its request has
  its first token. (The product computes it again in idle time, and sends it to the bucket within a minute.)
- What can't come from the bucket in time is on its way at once; the product fetches it after the first token. Nobody
  has waited in vain.
- There is no page cache: what isn't in memory is read from the disk, unless a request has just waited for it to come
  from the bucket. A chunk has one entry, whose size is proportional to its tokens, and the memory has no gaps: both
  unless the sizes of chunks are given (`System.sizes`).
"""

import hashlib
import heapq
import itertools
import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ragkv.batch.admission import Admission
from ragkv.batch.sharing import Item, Part
from ragkv.controller.cost_model import Chunk, Plan, Profile, longest_wait_s, plan
from ragkv.evals.simulated_tier import Tier
from ragkv.policies import Policy

MEMORY, DISK, BUCKET, NONE = TIERS = ("memory", "disk", "bucket", "none")  # where a chunk's KV is found
_MOST_AT_ONCE = 256  # requests in an engine
_POINTS = 64  # of each engine on the ring of hashes
_STEP_TOKENS, _SLICE_TOKENS = 2048, 512  # computed in a step, of a prompt that vLLM prefills, and of one that is fused


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its answer. arrived_s: from the beginning on.

    chunks: key and tokens of each, in the order of the prompt, no key twice. anchor_tokens: before them; their KV is
    always in memory. question_tokens: after them; they are computed. is_exact: chunks are blocks of a prefix, which is
    loaded as far as none is missing. `Admission` reads `item` and `is_exact`, of which its `Work` has the same.
    """

    arrived_s: float
    chunks: tuple[Part, ...]
    question_tokens: int
    answer_tokens: int
    anchor_tokens: int = 0
    is_exact: bool = False

    @property
    def num_tokens(self) -> int:
        return self.anchor_tokens + sum(tokens for _, tokens in self.chunks) + self.question_tokens

    @property
    def item(self) -> Item:
        return Item(self.chunks, self.num_tokens, self.answer_tokens)


@dataclass(frozen=True)
class System:
    """What is simulated. The engines are alike.

    kv_bytes: of a token, as stored. sizes: of chunks, by their keys, in bytes, if they are known. kv_tokens: how
    many tokens' KV fits into an engine's own memory, which limits how many requests are in it. memory_bytes,
    disk_bytes: of each engine's tiers; None: no limit. token_s: between two tokens of an answer. bucket_bytes_s:
    how much comes to each engine in a second from the bucket that they share, once bucket_latency_s is over; None
    if there is none. is_affine: a request goes to the engine that its first chunk's hash names, unless that has
    more than twice as many as the mean; else always to the one with the fewest requests. is_indexed: the KV of all
    chunks was stored before, in the bucket, else on each disk that has no limit.
    """

    num_engines: int
    profile: Profile
    policy: Policy
    kv_bytes: int
    kv_tokens: int
    memory_bytes: int
    disk_bytes: int | None = None
    token_s: float = 0.0
    eviction: str = "gdsf"
    bucket_bytes_s: float | None = None
    bucket_latency_s: float = 0.0
    is_affine: bool = False
    is_indexed: bool = False
    sizes: Mapping[Hashable, int] = field(default_factory=dict)
    admission: Callable[[int], Admission] = Admission

    def size(self, key: Hashable, tokens: int) -> int:
        """Return the bytes of a chunk's entry."""
        return self.sizes.get(key, tokens * self.kv_bytes)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has been answered, and when. way: as of `Plan`.

    tokens: of its chunks, by the tier in which their KV was when its turn came (`TIERS`); not all that is found need be
    loaded. disk_bytes, bucket_bytes: read for it.
    """

    arrived_s: float
    first_token_s: float
    ended_s: float
    way: str
    tokens: tuple[int, ...]
    disk_bytes: int
    bucket_bytes: int

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first_token_s - self.arrived_s)


@dataclass(slots=True)
class _Job:
    """A request in an engine. fetched: chunks that it has waited for. own: what `Admission` counts for it.
    computed_s: its engine's, up to which this one has waited for prompts."""

    request: Request
    fetched: frozenset[Hashable] = frozenset()
    bucket_bytes: int = 0
    own: int = 0
    computed_s: float = 0.0


@dataclass
class _Engine:
    """One engine. coming: what is on its way from the bucket, and when it will be there. link_free_s: when all is.
    computed_s: how long prompts have been prefilled or fused."""

    number: int
    memory: Tier
    disk: Tier
    admission: Admission
    waiting: deque[_Job] = field(default_factory=deque)
    num_running: int = 0
    is_busy: bool = False
    coming: dict[Hashable, float] = field(default_factory=dict)
    link_free_s: float = 0.0
    computed_s: float = 0.0

    def store(self, key: Hashable, size_bytes: int, cost: float) -> None:
        """Put an entry on the disk. What goes for it isn't used from memory any more either."""
        for evicted in self.disk.put(key, size_bytes, cost):
            self.memory.remove(evicted)


class Simulation:
    """One run of a system from empty engines on, or with all chunks stored."""

    def __init__(self, system: System) -> None:
        self.system = system
        is_shared = system.bucket_bytes_s is not None
        on_disk = system.is_indexed and not is_shared and system.disk_bytes is None
        self.bucket = Tier(None if is_shared else 0, system.eviction, has_all=is_shared and system.is_indexed)
        self.engines = [
            _Engine(
                number,
                Tier(system.memory_bytes, system.eviction, has_gaps=bool(system.sizes)),
                Tier(system.disk_bytes, system.eviction, remembers=True, has_all=on_disk),
                system.admission(system.kv_tokens),
            )
            for number in range(system.num_engines)
        ]
        self._loads, self._next = [0] * system.num_engines, 0  # requests that haven't been answered; whose turn it is
        points = itertools.product(range(system.num_engines), range(_POINTS))
        self._ring = sorted((_hash(point), point[0]) for point in points)
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], Answered | None]]] = []
        self._numbers = itertools.count()

    def index(self, chunks: Iterable[Part]) -> None:
        """Store chunks on every engine's disk, as if documents were indexed there."""
        for key, tokens in chunks:
            for engine in self.engines:
                engine.store(key, self.system.size(key, tokens), tokens)

    def run(self, requests: Iterable[Request]) -> Iterator[Answered]:
        """Answer requests, which come in the order of their arrival; yield each as its answer ends."""
        for request in requests:
            yield from self._until(request.arrived_s)
            self._now_s = request.arrived_s
            self._arrive(request)
        yield from self._until(math.inf)

    def _until(self, end_s: float) -> Iterator[Answered]:
        while self._events and self._events[0][0] <= end_s:
            self._now_s, _, action = heapq.heappop(self._events)
            if (answered := action()) is not None:
                yield answered

    def _at(self, time_s: float, action: Callable[[], Answered | None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), action))

    def _arrive(self, request: Request) -> None:
        number = self._affine(request) if self.system.is_affine and request.chunks else None
        if number is None:  # the least loaded; of several of them, the next one in turn
            least, later = min(self._loads), self._loads[self._next :]
            number = self._next + later.index(least) if least in later else self._loads.index(least)
            self._next = (number + 1) % len(self._loads)
        self._loads[number] += 1
        engine, job, rate = self.engines[number], _Job(request), self.system.bucket_bytes_s
        ready_s = self._now_s if rate is None else self._fetch(engine, job, rate)
        self._at(ready_s, partial(self._start, engine, job))

    def _affine(self, request: Request) -> int | None:
        """Return the engine that comes next to the first chunk's hash on the ring; None if it is overloaded."""
        point = bisect(self._ring, (_hash(request.chunks[0][0]), 0)) % len(self._ring)
        number, mean = self._ring[point][1], sum(self._loads) / len(self._loads)
        return None if self._loads[number] > 2 * max(1.0, mean) else number

    def _fetch(self, engine: _Engine, job: _Job, bytes_s: float) -> float:
        """Have the chunks brought that the disk lacks and the bucket has, in the order of the prompt. Returns when the
        request goes on: once those have come that can be expected in the time that the product waits."""
        system, request = self.system, job.request
        missing = [(key, tokens) for key, tokens in request.chunks if key not in engine.disk]
        num_missing = sum(tokens for _, tokens in missing)
        longest_s = longest_wait_s(system.profile, request.num_tokens, num_missing) if missing else 0.0
        ready_s, awaited, is_in_time = self._now_s, list[Hashable](), True
        for key, tokens in missing:
            if key not in self.bucket:
                if request.is_exact:
                    break
                continue
            if key not in engine.coming:
                size_bytes = system.size(key, tokens)
                engine.link_free_s = max(engine.link_free_s, self._now_s) + size_bytes / bytes_s
                engine.coming[key] = engine.link_free_s + system.bucket_latency_s
                job.bucket_bytes += size_bytes
                self._at(engine.coming[key], partial(self._come, engine, key, tokens))
            is_in_time = is_in_time and engine.coming[key] - self._now_s <= longest_s
            if is_in_time:
                awaited.append(key)
                ready_s = max(ready_s, engine.coming[key])
        job.fetched = frozenset(awaited)
        return ready_s

    def _come(self, engine: _Engine, key: Hashable, tokens: int) -> None:
        del engine.coming[key]
        engine.store(key, self.system.size(key, tokens), tokens)

    def _start(self, engine: _Engine, new: _Job | None = None) -> None:
        """Let the engine begin with the next prompt, if it is free, and has memory for it. new: waits from now on."""
        if new is not None:
            engine.waiting.append(new)
        if engine.is_busy or not engine.waiting or engine.num_running >= _MOST_AT_ONCE:
            return
        if engine.num_running and not engine.admission.fits(engine.waiting[0].request):
            return
        job = engine.waiting.popleft()
        job.own = engine.admission.start(job.request)
        found = _found(engine, job)
        way = self._plan(job.request, found)
        num_read = self._load(engine, job, found, way)
        num_steps = self._num_steps(job.request, way) if engine.num_running else 0.0
        engine.num_running, engine.is_busy = engine.num_running + 1, True
        first_token = partial(self._first_token, engine, job, found, way, num_read)
        self._at(self._now_s + 1e-3 * way.predicted_ms + num_steps * self.system.token_s, first_token)

    def _plan(self, request: Request, found: Sequence[str]) -> Plan:
        """Return the product's plan; its `chunks` are indices of the request's. The anchor is one more chunk."""
        stored = [i for i, tier in enumerate(found) if tier != NONE]
        is_cold = [found[i] == DISK for i in stored]
        if request.is_exact:  # of a prefix only the beginning can be warm
            is_cold = list(itertools.accumulate(is_cold, max))
        chunks = [Chunk(request.chunks[i][1], cold) for i, cold in zip(stored, is_cold, strict=True)]
        if request.anchor_tokens:
            chunks, stored = [Chunk(request.anchor_tokens), *chunks], [-1, *stored]
        way = plan(self.system.profile, request.num_tokens, chunks, self.system.policy)
        return replace(way, chunks=tuple(stored[i] for i in way.chunks if stored[i] >= 0))

    def _num_steps(self, request: Request, way: Plan) -> float:
        """Return how many tokens others decode until a prompt is computed: in each of its steps, and half of one that
        it has to wait for."""
        if way.way == "prefill":
            return 0.5 + -(-request.num_tokens // _STEP_TOKENS)
        num_loaded = request.anchor_tokens + sum(request.chunks[i][1] for i in way.chunks)
        num_computed = request.num_tokens - num_loaded + round(self.system.policy.budget * num_loaded)
        is_probed = self.system.policy.recomputes_some  # which takes a step
        return 0.5 + is_probed + -(-num_computed // _SLICE_TOKENS)

    def _load(self, engine: _Engine, job: _Job, found: Sequence[str], way: Plan) -> int:
        """Count the uses of the chunks that are loaded, keep them in memory, and return the bytes read from the disk.

        Of a prefix the end comes first, so that it is what goes first. Nothing counts of a prompt that is left to vLLM.
        """
        if way.way == "prefill":
            return 0
        parts, num_read = job.request.chunks, 0
        loaded = {parts[i][0] for i in way.chunks}
        for i in reversed(range(len(parts))) if job.request.is_exact else range(len(parts)):
            key, tokens = parts[i]
            if key not in loaded and found[i] != NONE:
                continue
            engine.disk.touch(key)
            engine.memory.touch(key)
            if key in loaded and found[i] != MEMORY:
                size_bytes = self.system.size(key, tokens)
                num_read += size_bytes if found[i] == DISK else 0
                engine.memory.put(key, size_bytes, tokens, spared=loaded)
        return num_read

    def _first_token(self, engine: _Engine, job: _Job, found: Sequence[str], way: Plan, num_read: int) -> None:
        """Store what had to be computed, decode the answer, and go on with the next prompt."""
        engine.computed_s += 1e-3 * way.predicted_ms
        job.computed_s = engine.computed_s
        request, parts = job.request, job.request.chunks
        missing = [part for part, tier in zip(parts, found, strict=True) if tier == NONE]
        spared = {key for key, _ in parts}
        for key, tokens in reversed(missing) if request.is_exact else missing:
            size_bytes = self.system.size(key, tokens)
            engine.store(key, size_bytes, tokens)
            if key in engine.disk:
                engine.memory.put(key, size_bytes, tokens, spared)
            self.bucket.put(key, size_bytes, tokens)
        in_tiers = tuple(
            sum(tokens for (_, tokens), each in zip(parts, found, strict=True) if each == tier) for tier in TIERS
        )
        end_s = self._now_s + max(0, request.answer_tokens - 1) * self.system.token_s
        answered = Answered(request.arrived_s, self._now_s, end_s, way.way, in_tiers, num_read, job.bucket_bytes)
        self._at(end_s, partial(self._decoded, engine, job, answered))
        engine.is_busy = False
        self._start(engine)

    def _decoded(self, engine: _Engine, job: _Job, answered: Answered) -> Answered | None:
        """End an answer, unless prompts have been computed meanwhile: then it takes so much longer."""
        waited_s, job.computed_s = engine.computed_s - job.computed_s, engine.computed_s
        if waited_s and job.request.answer_tokens > 1:
            answered = replace(answered, ended_s=self._now_s + waited_s)
            self._at(answered.ended_s, partial(self._decoded, engine, job, answered))
            return None
        return self._end(engine, job, answered)

    def _end(self, engine: _Engine, job: _Job, answered: Answered) -> Answered:
        engine.admission.end(job.request, job.own, job.request.answer_tokens)
        engine.num_running -= 1
        self._loads[engine.number] -= 1
        self._start(engine)
        return answered


def _found(engine: _Engine, job: _Job) -> list[str]:
    """Return where each chunk's KV is. In a prefix nothing counts behind the first block that is missing."""
    found = [
        MEMORY if key in engine.memory else NONE if key not in engine.disk else BUCKET if key in job.fetched else DISK
        for key, _ in job.request.chunks
    ]
    if job.request.is_exact and NONE in found:
        end = found.index(NONE)
        found[end:] = [NONE] * (len(found) - end)
    return found


def _hash(key: Hashable) -> int:
    """Return a number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest())


@dataclass(frozen=True)
class Expected:
    """What a real run is compared with. memory_share: of the chunks' tokens whose KV was found, those in memory.
    ttft_mean_ms, ttft_p90_ms: of all that count."""

    memory_share: float
    ttft_mean_ms: float
    ttft_p90_ms: float


def expected(requests: Sequence[Request], system: System, counted: Sequence[int] | None = None) -> Expected:
    """Return how a system answers requests. counted: the numbers of those that count; None: all."""
    answers = sorted(Simulation(system).run(requests), key=lambda each: each.arrived_s)
    answers = answers if counted is None else [answers[i] for i in counted]
    loaded = np.sum([each.tokens for each in answers if each.way != "prefill"] or [(0,) * len(TIERS)], axis=0)
    ttfts = [each.ttft_ms for each in answers]
    memory_share = float(loaded[0] / max(1, loaded[:3].sum()))
    return Expected(memory_share, float(np.mean(ttfts)), float(np.percentile(ttfts, 90)))
