"""What the scheduler's side loads and stores of exact prefixes."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from ragkv.engine.prefixes import EXACT, Beginnings, Prefixes, Reuse, WriteBudget
from ragkv.engine.scheduler import PrefixRules, SchedulerSide, StepReports
from ragkv.engine.task import PrefixUse, Report, StageReport, TokenReport, lost_from_params, to_params
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV

BLOCK = 128
KEY = "the engine's"


def hashes(text, salt=""):
    """As vLLM's: of each full block together with all that is before it. A letter is a block."""
    return [f"{salt}:{text[:end]}".encode().ljust(32, b".")[-32:] for end in range(1, len(text) + 1)]


def tokens(text):
    return [ord(letter) for letter in text for _ in range(BLOCK)]


def beginnings(text, salt="", more=()):
    """Of full blocks, and of some more tokens."""
    return Beginnings(hashes(text, salt), [*tokens(text), *more], BLOCK)


@pytest.fixture
def store(tmp_path):
    with_store = DiskStore(tmp_path)
    yield with_store
    with_store.close()


@pytest.fixture
def prefixes(store):
    return Prefixes(store.contains, lambda: 7, "f" * 32, (0, 1), BLOCK)


def put(store, *spans):
    kv = LayerKV(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), 0)
    store.put([(ChunkKey(span.chunk_hash, EXACT, "f" * 32, (0, 1)), [kv]) for span in spans])


def ends(spans):
    return [(span.start // BLOCK, span.end // BLOCK) for span in spans]


def test_the_longest_stored_prefix_is_found(store, prefixes):
    spans = prefixes.missing(beginnings("abcde"), 5 * BLOCK)
    assert ends(spans) == [(0, 2), (2, 4), (4, 5)]
    put(store, *spans)
    find = lambda text, known=0, most=10_000: ends(prefixes.find(beginnings(text), known, most))  # noqa: E731
    assert find("abcdefg") == [(0, 2), (2, 4), (4, 5)]
    assert find("abcdx") == [(0, 2), (2, 4)]
    assert find("abcdefg", most=4 * BLOCK + 1) == [(0, 2), (2, 4)]
    assert find("abcdefg", known=2 * BLOCK) == [(2, 4), (4, 5)]
    assert find("abcdefg", known=3 * BLOCK) == [(2, 4), (4, 5)]  # all of a segment, of which vLLM has a half
    assert find("abcdefg", known=4 * BLOCK) == [(4, 5)]
    assert find("abcde", known=5 * BLOCK) == []
    assert find("abcdefg", most=5 * BLOCK - 1, known=4 * BLOCK) == []
    without_tails = Beginnings(hashes("abcdefg"), (), BLOCK)
    assert prefixes.find(without_tails, 4 * BLOCK, 10_000) == ()  # too short where nothing says that blocks are long
    assert find("xbcde") == find("ab", most=BLOCK) == find("") == []
    assert prefixes.find(beginnings("abcde", "other salt"), 0, 10_000) == ()
    assert ends(prefixes.missing(beginnings("abcdefgh"), 8 * BLOCK)) == [(4, 6), (6, 8)]
    assert ends(prefixes.missing(beginnings("xy"), BLOCK)) == [(0, 1)]
    assert prefixes.missing(Beginnings(hashes("xy"), (), BLOCK), BLOCK) == ()


def test_a_segment_that_is_gone_ends_the_prefix(store, prefixes):
    spans = prefixes.missing(beginnings("abcdef"), 6 * BLOCK)
    put(store, spans[0], spans[2])
    assert ends(prefixes.find(beginnings("abcdef"), 0, 10_000)) == [(0, 2)]


def test_loading_is_left_out_where_prefill_is_quicker(prefixes, monkeypatch):
    clock = itertools.count(1000.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert prefixes.pays(None) and prefixes.pays(0.001)  # nobody knows
    prefixes.timed(500, 20.0)  # 40 ms for a thousand tokens
    assert prefixes.pays(50.0) and not prefixes.pays(30.0)
    prefixes.timed(1000, 10.0)
    assert prefixes.pays(30.0) and not prefixes.pays(20.0)
    clock = itertools.count(9000.0)
    assert prefixes.pays(20.0)  # for once


@pytest.mark.parametrize("num_more", [0, 31, 32, 50, 96, 127])
def test_a_tail_is_less_than_a_block(store, prefixes, num_more):
    more = list(range(1000, 1000 + num_more))
    spans = prefixes.missing(beginnings("abc", more=more), 3 * BLOCK + num_more)
    end = 3 * BLOCK + num_more // 32 * 32
    assert [(each.start, each.end) for each in spans][2:] == ([(3 * BLOCK, end)] if num_more >= 32 else [])
    put(store, *spans)
    assert prefixes.missing(beginnings("abc", more=more), 3 * BLOCK + num_more) == ()

    def find(text, behind, known=0, most=10_000, salt=""):
        found = prefixes.find(beginnings(text, salt, behind), known, most)
        return found[-1].end if found else 0

    assert find("abc", more) == find("abc", [*more, 1, 2, 3]) == find("abc", more, known=BLOCK) == end
    assert find("abc", more, most=end) == end
    other = [*more[:-1], 7]
    assert find("abc", other) == 3 * BLOCK + (0 if num_more % 32 == 0 else num_more // 32 * 32)
    assert find("abd", more) == 2 * BLOCK and find("abc", more, salt="other") == find("", more) == 0
    assert find("abc", more, most=3 * BLOCK + 31) == 3 * BLOCK
    assert find("abc", more, known=3 * BLOCK) == (end if num_more >= 32 else 0)


def test_a_shared_tail_is_found_behind_another_question(store, prefixes):
    reuse, more = Reuse(), list(range(1000, 1116))

    def asked(question):  # of 20 tokens, so that there are four full blocks
        token_ids = [*tokens("abc"), *more, *[question] * 20]
        return Beginnings([*hashes("abc"), bytes([question]) * 32], token_ids, BLOCK)

    assert reuse.worth(None, asked(1), 520, 520) == 0
    shared = reuse.worth(None, asked(2), 520, 520)
    assert shared == 3 * BLOCK + 96
    put(store, *prefixes.missing(asked(2), shared))
    assert prefixes.find(asked(3), 0, 519)[-1].end == shared


def test_a_prefix_may_be_shorter_than_a_block(store, prefixes):
    def asked(question, start=0, salt=None):  # an instruction of 100 tokens, and a question of 20
        return Beginnings([], [*range(start, 100), *[question] * 20], BLOCK, salt and (("cache_salt", salt),))

    reuse = Reuse()
    assert reuse.worth(None, asked(1), 120, 120) == 0
    shared = reuse.worth(None, asked(2), 120, 120)
    assert shared == 96
    (span,) = prefixes.missing(asked(2), shared)
    assert (span.start, span.end) == (0, 96)
    put(store, span)
    assert prefixes.find(asked(3), 0, 119) == (span,)
    assert prefixes.find(asked(3), 0, 95) == prefixes.find(asked(3, start=1), 0, 119) == ()
    assert prefixes.find(asked(3, salt="a"), 0, 119) == ()
    assert prefixes.missing(asked(1), 95) == ()  # too short


@pytest.mark.parametrize("block", [16, 32, 48])
def test_short_blocks_have_no_tails(block):
    names = [bytes([i]) * 32 for i in range(10)]
    some = Beginnings(names, range(10 * block + block - 1), block)
    assert not some.has_tails and list(some.tails(2 * block, 10_000)) == []
    assert some.longest(10_000) == 10 * block and list(some.ends(3 * block + 5)) == [block, 2 * block, 3 * block]


def test_a_request_with_images_has_no_tails():
    some = Beginnings(hashes("abc"), (), BLOCK)
    assert some.longest(3 * BLOCK + 100) == 3 * BLOCK and list(some.ends(10_000)) == [BLOCK, 2 * BLOCK, 3 * BLOCK]


def test_what_is_worth_storing():
    long, short = Reuse(), Reuse()

    def worth(text, keep=None, prompt=None, reuse=long):
        num_prompt = BLOCK * len(text if prompt is None else prompt)
        return reuse.worth(keep, Beginnings(hashes(text), (), BLOCK), num_prompt, BLOCK * len(text)) // BLOCK

    assert worth("abcx") == 0
    assert worth("abcy") == 3  # an instruction of three blocks
    assert worth("abcydef") == 7  # it goes on where another request has ended
    assert worth("mno") == 0
    assert worth("mnopq") == 5
    assert worth("rst", "once") == 0
    assert worth("rstuv", "session") == 5
    assert worth("1234", "shared", prompt="12") == 2
    assert worth("") == 0
    assert worth("a", reuse=short) == 0
    assert worth("ab", reuse=short) == 1  # no conversation: what has ended there is too short


def test_only_so_much_is_remembered(monkeypatch):
    monkeypatch.setattr("ragkv.engine.prefixes._REMEMBERED", 4)
    reuse = Reuse()
    worth = lambda text: reuse.worth(None, Beginnings(hashes(text), (), BLOCK), 0, 3 * BLOCK) // BLOCK  # noqa: E731
    worth("abc")
    worth("xyz")
    assert worth("xyq") == 2
    assert worth("abc") == 0


def test_an_hour_has_a_budget(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    budget = WriteBudget(3600)
    assert budget.take(3000) and not budget.take(1000) and budget.take(600)
    now[0] = 100.0
    assert budget.take(100) and not budget.take(1)
    now[0] = 1e6
    assert budget.take(3600) and not budget.take(1)


class Engine:
    """A scheduler's side, and requests of it. A letter is a block of tokens."""

    def __init__(self, prefixes, bytes_per_hour=1e12):
        rules = PrefixRules(prefixes, Reuse(), WriteBudget(bytes_per_hour), bytes_per_token=1)
        self.side = SchedulerSide(rules, key=KEY)
        self.side.keep(StepReports({}, keeps_prefixes=True))

    def request(self, id, text, **use):
        num_tokens = BLOCK * len(text) + 10
        return SimpleNamespace(
            request_id=id,
            kv_transfer_params=to_params(None, PrefixUse(**use), KEY),
            block_hashes=hashes(text),
            prompt_token_ids=[0] * num_tokens,
            all_token_ids=[*tokens(text), *[0] * 10],
            mm_features=[],
            prompt_embeds=None,
            skip_reading_prefix_cache=False,
            lora_request=None,
            cache_salt=None,
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
            num_computed_tokens=num_tokens,
        )

    def ask(self, id, text, **use):
        """Returns how many blocks are loaded, and the spans that are stored at the end."""
        request = self.request(id, text, **use)
        num_loaded, is_async = self.side.match(request, 0)
        assert is_async == bool(num_loaded)
        if num_loaded:
            self.side.start(request, list(range(len(text))), num_loaded)
            (job,) = self.side.take_work(0, 0).jobs
            assert job.task is None and job.stored[-1].end == num_loaded
            self.side.keep(StepReports({id: Report()}))
        kept = self.side.save(request, list(range(len(text) + 1)))
        self.side.finish(id)
        saves = self.side.take_work(0, 0).saves
        assert kept == bool(saves)
        return num_loaded // BLOCK, saves[0] if saves else None


def test_a_request_is_stored_and_the_next_one_loads_it(store, prefixes):
    engine = Engine(prefixes)
    loaded, save = engine.ask("1", "abcd", keep="session")
    assert loaded == 0 and ends(save.spans) == [(0, 2), (2, 4)]
    assert (save.generation, save.keep) == (7, "session")
    put(store, *save.spans)
    loaded, save = engine.ask("2", "abcdef", keep="session", generation=5)
    assert loaded == 4 and ends(save.spans) == [(4, 6)] and save.generation == 5
    assert engine.ask("3", "abcd", keep="session") == (4, None)
    loaded, save = engine.ask("4", "abcdx")  # it goes on where the first has ended
    assert loaded == 4 and ends(save.spans) == [(4, 5)]
    engine.side.keep(StepReports({"4": Report(None, TokenReport(exact=512), StageReport(prefix_ms=512.0))}))
    assert engine.ask("5", "abcd", prefill_ms=999.0) == (0, None)
    assert engine.ask("6", "abcd", prefill_ms=1001.0)[0] == 4


def test_a_request_that_is_aborted_before_its_kv_is_loaded_isnt_stored(store, prefixes):
    """Its blocks are empty; and vLLM ends if it is told twice that a request's blocks are free."""
    engine = Engine(prefixes)
    put(store, *engine.ask("1", "abcd", keep="session")[1].spans)
    blocks = list(range(7))
    for id, has_come in (("2", False), ("3", True)):
        request = engine.request(id, "abcdef", keep="session")
        engine.side.start(request, blocks, engine.side.match(request, 0)[0])
        engine.side.take_work(0, 0)
        if has_come:
            engine.side.keep(StepReports({id: Report(None, TokenReport(exact=4 * BLOCK), StageReport())}))
        assert engine.side.save(request, blocks) == has_come
        engine.side.finish(id)
        work = engine.side.take_work(0, 0)
        assert (work.aborted == {id}, len(work.saves)) == (not has_come, has_come)


def test_a_folder_that_cant_be_read_costs_the_prefixes_only(prefixes, monkeypatch, caplog):
    engine = Engine(prefixes)

    def broken(key):
        raise PermissionError("not yours")

    monkeypatch.setattr(prefixes, "_contains", broken)
    assert engine.ask("1", "abcd", keep="session") == (0, None)
    engine.side._generations["2"] = 7  # it became so while the request was in work
    assert not engine.side.save(engine.request("2", "abcd", keep="session"), list(range(5)))
    assert "can't be looked up" in caplog.text and "isn't kept" in caplog.text
    assert lost_from_params(engine.side.finish("2")) == 1


def test_the_next_request_that_ends_says_how_many_prefixes_were_lost(prefixes):
    engine = Engine(prefixes)
    assert engine.side.finish("1") is None
    lost = StepReports({}, num_lost=2)
    engine.side.keep(lost.aggregate(StepReports({}, num_lost=1)))
    engine.side.keep(lost)
    assert lost_from_params(engine.side.finish("2")) == 5
    assert engine.side.finish("3") is None


def test_nothing_is_stored_before_the_worker_can_or_beyond_the_budget(prefixes):
    engine = Engine(prefixes, bytes_per_hour=3 * BLOCK)
    assert ends(engine.ask("1", "abcd", keep="session")[1].spans) == [(0, 2)]
    assert engine.ask("2", "xyz", keep="session")[1] is None
    assert ends(engine.ask("3", "xyz", keep="session", is_given=True)[1].spans) == [(0, 2), (2, 3)]
    engine = Engine(prefixes)
    engine.side = SchedulerSide(engine.side._prefixes)
    assert engine.ask("1", "abcd", keep="session") == (0, None)
    engine.side = SchedulerSide()
    assert engine.ask("1", "abcd", keep="session") == (0, None)
