"""What is fused of requests that have no task, and under which names vLLM caches it."""

from itertools import takewhile

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from ragkv.controller.cost_model import Profile
from ragkv.engine.finding import Finding
from ragkv.engine.scheduler import SchedulerSide
from ragkv.engine.task import KEY_KEY, FuseTask, PrefixUse, Span, to_params
from ragkv.policies import Policy

BLOCK, KEY = 16, "the engine's"
DEFAULT = Policy.parse("guided:0.05")
CHUNK = list(range(1000, 1200))


@pytest.fixture(scope="module")
def hasher():
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


class Engine:
    """A scheduler's side that finds CHUNK, whole, wherever it stands."""

    def __init__(self, hasher):
        self.hasher, self.num = hasher, 0
        self.cached = set()  # the names of blocks that vLLM has
        self.finding = Finding(self.find, DEFAULT, BLOCK, cached=self.num_cached)
        self.side = SchedulerSide(finding=self.finding, key=KEY)
        self.is_stored = True

    def find(self, token_ids, salt):
        starts = [i for i in range(len(token_ids)) if token_ids[i : i + len(CHUNK)] == CHUNK] if self.is_stored else []
        return tuple(Span(start, start + len(CHUNK), "c" * 32, "m" * 32) for start in starts if salt != "nobody's")

    def num_cached(self, names):
        return len([*takewhile(self.cached.__contains__, names)])

    def request(self, token_ids, params=None, salt=None, **sampling):
        self.num += 1
        params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params}, **sampling)
        return Request(str(self.num), list(token_ids), params, None, cache_salt=salt, block_hasher=self.hasher)

    def ask(self, token_ids, params=None, **how):
        request = self.request(token_ids, params, **how)
        self.side.arrive(request)
        return request, self.finding.task(request.request_id)

    def exact(self, token_ids, salt=None):
        return self.request(token_ids, salt=salt).block_hashes


@pytest.fixture
def engine(hasher):
    return Engine(hasher)


def shared(a, b):
    """How many blocks of two requests have the same names, from the first on."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def test_blocks_from_the_first_chunk_on_have_names_of_their_own(engine):
    before, question = list(range(40)), [7] * 20
    prompt = [*before, *CHUNK, *question]
    request, task = engine.ask(prompt)
    assert task == FuseTask((Span(40, 240, "c" * 32, "m" * 32),), DEFAULT)
    exact = engine.exact(prompt)
    assert shared(request.block_hashes, exact) == 2 and len(request.block_hashes) == len(exact)
    assert not set(request.block_hashes[2:]) & set(exact)
    request.append_output_token_ids(list(range(40)))
    longer = engine.exact([*prompt, *range(40)])
    assert len(request.block_hashes) == len(longer) and not set(request.block_hashes[2:]) & set(longer)

    again, _ = engine.ask(prompt)
    assert again.block_hashes == request.block_hashes[: len(exact)]
    other, _ = engine.ask([*before, *CHUNK, *[8] * 20])
    assert shared(other.block_hashes, request.block_hashes) == 2  # its choice of tokens is another one
    full, task = engine.ask(prompt, {"policy": "full"})
    assert full.block_hashes == exact and task is None
    none, task = engine.ask(prompt, {"policy": "none"})
    assert task.policy == Policy.parse("none") and shared(none.block_hashes, request.block_hashes) == 2
    other, _ = engine.ask([*before, *CHUNK, *[8] * 20], {"policy": "none"})
    assert shared(other.block_hashes, none.block_hashes) == 240 // BLOCK


def test_a_chunk_at_the_very_beginning(engine):
    prompt = [*CHUNK, *range(50)]
    request, task = engine.ask(prompt)
    assert task.spans[0].start == 0 and shared(request.block_hashes, engine.exact(prompt)) == 0
    salted, _ = engine.ask(prompt, salt="a tenant's")
    assert not set(salted.block_hashes) & {*request.block_hashes, *engine.exact(prompt, "a tenant's")}


def test_a_prompt_that_goes_on_finds_the_blocks_of_the_one_before(engine):
    first = [*range(40), *CHUNK, *[7] * 30]
    one, _ = engine.ask(first)
    second = [*first, *[5] * 50]
    two, task = engine.ask(second)
    assert task.spans == (Span(40, 240, "c" * 32, "m" * 32),)
    assert shared(two.block_hashes, one.block_hashes) == len(one.block_hashes)
    third = [*second, *CHUNK, *[4] * 30]
    three, task = engine.ask(third)
    assert [span.start for span in task.spans] == [40, len(second)]
    assert shared(three.block_hashes, two.block_hashes) == len(two.block_hashes)
    other, _ = engine.ask([*second, *CHUNK, *[3] * 30])
    assert shared(other.block_hashes, three.block_hashes) == len(second) // BLOCK
    full, _ = engine.ask(third, {"policy": "full"})
    assert full.block_hashes == engine.exact(third)
    another, _ = engine.ask([*first[:-4], *[2] * 60])  # the same full blocks, and another question behind them
    assert shared(another.block_hashes, one.block_hashes) == 2
    assert shared(engine.ask(second)[0].block_hashes, one.block_hashes) == len(one.block_hashes)
    engine.is_stored = False
    gone, task = engine.ask(second)
    assert task is None and gone.block_hashes == engine.exact(second)


@pytest.mark.parametrize(
    "how",
    [{"prompt_logprobs": 1}, {"salt": "nobody's"}, {"params": {"policy": "full"}}],
    ids=["log-probabilities of the prompt", "another tenant", "full"],
)
def test_what_isnt_fused_keeps_its_names(engine, how):
    prompt = [*range(40), *CHUNK, *[7] * 30]
    request, task = engine.ask(prompt, **how)
    assert task is None and request.block_hashes == engine.exact(prompt, how.get("salt"))


def test_too_little_isnt_fused(engine):
    for prompt in ([*CHUNK, *range(300)], [*range(100)], [*range(30), *CHUNK[:-1], 0]):
        request, task = engine.ask(prompt)
        assert task is None and request.block_hashes == engine.exact(prompt)


def test_what_vllm_has_exactly_stays_so(engine):
    first = [*range(40), *CHUNK, *[7] * 30]
    second = [*first, *[5] * 4, *CHUNK, *[4] * 30]
    engine.cached = set(engine.exact(first))  # more than half of it
    request, task = engine.ask(second)
    assert task.spans == (Span(274, 474, "c" * 32, "m" * 32),)
    assert shared(request.block_hashes, engine.exact(second)) == 274 // BLOCK
    again, task = engine.ask([*first, *[5] * 20])
    assert task is None and again.block_hashes == engine.exact([*first, *[5] * 20])
    engine.cached = set(engine.exact(first[:100]))  # the first chunk in part
    _, task = engine.ask([*second, 3])
    assert [span.start for span in task.spans] == [40, 274]


def test_what_vllm_prefills_sooner_is_left_to_it(engine):
    def is_fused(fused_ms, num_before, params=None):
        engine.finding._profile = Profile(DEFAULT, (0.0, 1000.0, 0.0), (fused_ms, *[0.0] * 5), 0.0)
        question = [int(fused_ms)] * 20
        return engine.ask([*range(3000, 3000 + num_before), *CHUNK, *question], params)[1] is not None

    # vLLM takes 220 ms for what stands behind the first tokens, which are computed either way.
    assert [is_fused(fused_ms, 40) for fused_ms in (200, 215, 400)] == [True, False, False]
    assert [is_fused(fused_ms, 3000) for fused_ms in (201, 216, 401)] == [True, False, False]
    assert is_fused(402, 40, {"policy": "none"}), "that policy wasn't measured"


def test_the_last_token_of_a_prompt_isnt_fused(engine):
    prompt = [*range(40), *CHUNK]
    _, task = engine.ask(prompt)
    assert task.spans == (Span(40, 239, "c" * 32, "m" * 32, num_tokens=200),)


def test_a_fault_of_ours_leaves_a_request_to_vllm(engine, hasher):
    def fail(token_ids, salt):
        raise OSError("the catalogue is gone")

    engine.finding._find = fail
    prompt = [*range(40), *CHUNK, *[7] * 30]
    request, task = engine.ask(prompt)
    assert task is None and request.block_hashes == engine.exact(prompt)
    assert engine.side.take_totals()["failed_requests"] == 1


@pytest.mark.parametrize("policy", ["fastest", 3, "guided:-1", None, {"a": 1}])
def test_a_policy_that_is_none_is_the_default(engine, policy):
    _, task = engine.ask([*range(40), *CHUNK, *[7] * 30], {"policy": policy})
    assert task.policy == DEFAULT


def test_a_task_without_the_engines_key_isnt_done(engine):
    evil = FuseTask((Span(0, 200, "e" * 32, "m" * 32),), Policy.parse("none"))
    for key in ("", "another", None, 3):
        params = {**to_params(evil, PrefixUse("shared", is_given=True), ""), KEY_KEY: key}
        request, task = engine.ask([*range(40), *CHUNK, *[7] * 30], params)
        assert task.spans[0].start == 40
        assert engine.side._task(request) == task and engine.side._prefix_use(request) == PrefixUse()
        assert engine.side.match(request, 0) == (269, True)
    request, task = engine.ask([*range(40), *CHUNK, *[7] * 30], to_params(evil, PrefixUse("shared"), KEY))
    assert task is None and engine.side._task(request) == evil
    for junk in ("a text", ["session"], {"keep": "shared"}, {"keep": {}}, 7):
        request, _ = engine.ask([1, 2], {"ragkv_prefix": junk, "ragkv_task": junk})
        assert engine.side._prefix_use(request) == PrefixUse() and engine.side._task(request) is None
    request, _ = engine.ask([1, 2], {"ragkv_prefix": {"keep": "session"}})
    assert engine.side._prefix_use(request) == PrefixUse("session")
