"""What the scheduler's side loads and stores of exact prefixes."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from ragkv.engine.prefixes import EXACT, Prefixes, Reuse, WriteBudget
from ragkv.engine.scheduler import PrefixRules, SchedulerSide, StepReports
from ragkv.engine.task import PrefixUse, Report, StageReport, TokenReport, lost_from_params, to_params
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV

BLOCK = 128


def hashes(text, salt=""):
    """As vLLM's: of each full block together with all that is before it. A letter is a block."""
    return [f"{salt}:{text[:end]}".encode().ljust(32, b".")[-32:] for end in range(1, len(text) + 1)]


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
    spans = prefixes.missing(hashes("abcde"), 5)
    assert ends(spans) == [(0, 2), (2, 4), (4, 5)]
    put(store, *spans)
    find = lambda text, known=0, most=10_000: ends(prefixes.find(hashes(text), known, most))  # noqa: E731
    assert find("abcdefg") == [(0, 2), (2, 4), (4, 5)]
    assert find("abcdx") == [(0, 2), (2, 4)]
    assert find("abcdefg", most=4 * BLOCK + 1) == [(0, 2), (2, 4)]
    assert find("abcdefg", known=2 * BLOCK) == [(2, 4), (4, 5)]
    assert find("abcdefg", known=3 * BLOCK) == [(2, 4), (4, 5)]  # all of a segment, of which vLLM has a half
    assert find("abcdefg", known=4 * BLOCK) == []  # too short
    assert find("xbcde") == find("ab", most=BLOCK) == find("") == []
    assert prefixes.find(hashes("abcde", "other salt"), 0, 10_000) == ()
    assert ends(prefixes.missing(hashes("abcdefgh"), 8)) == [(4, 6), (6, 8)]
    assert prefixes.missing(hashes("ab"), 1) == ()


def test_a_segment_that_is_gone_ends_the_prefix(store, prefixes):
    spans = prefixes.missing(hashes("abcdef"), 6)
    put(store, spans[0], spans[2])
    assert ends(prefixes.find(hashes("abcdef"), 0, 10_000)) == [(0, 2)]


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


def test_what_is_worth_storing():
    reuse = Reuse(BLOCK)
    worth = lambda text, keep=None, prompt=None: reuse.worth(  # noqa: E731
        keep, hashes(text), BLOCK * len(text if prompt is None else prompt), len(text)
    )
    assert worth("abcx") == 0
    assert worth("abcy") == 3  # an instruction of three blocks
    assert worth("abcydef") == 7  # it goes on where another request has ended
    assert worth("mno") == 0
    assert worth("mnopq") == 5
    assert worth("rst", "once") == 0
    assert worth("rstuv", "session") == 5
    assert worth("1234", "shared", prompt="12") == 2
    assert worth("") == 0
    short = Reuse(BLOCK)
    assert short.worth(None, hashes("a"), BLOCK, 1) == 0
    assert short.worth(None, hashes("ab"), BLOCK, 2) == 1  # no conversation: what has ended there is too short


def test_only_so_much_is_remembered(monkeypatch):
    monkeypatch.setattr("ragkv.engine.prefixes._REMEMBERED_BLOCKS", 4)
    reuse = Reuse(BLOCK)
    for text in ("abc", "xyz"):
        reuse.worth(None, hashes(text), 0, 3)
    assert reuse.worth(None, hashes("xyq"), 0, 3) == 2
    assert reuse.worth(None, hashes("abc"), 0, 3) == 0


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
        self.side = SchedulerSide(PrefixRules(prefixes, Reuse(BLOCK), WriteBudget(bytes_per_hour), bytes_per_token=1))
        self.side.keep(StepReports({}, keeps_prefixes=True))

    def request(self, id, text, **use):
        num_tokens = BLOCK * len(text) + 10
        return SimpleNamespace(
            request_id=id,
            kv_transfer_params=to_params(None, PrefixUse(**use)),
            block_hashes=hashes(text),
            prompt_token_ids=[0] * num_tokens,
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
