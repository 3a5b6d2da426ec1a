"""How many requests of a batch are in the engine at a time."""

from ragkv.batch.admission import Admission
from ragkv.batch.sharing import Item
from ragkv.batch.work import Work


async def never():
    raise AssertionError("nothing runs here")


def exact(*names, num_tokens=40, max_tokens=10):
    return Work("", Item(tuple((name, 16) for name in names), num_tokens, max_tokens), never)


def test_shared_blocks_count_once():
    admission = Admission(68)  # and 17 that wait
    started = []
    for work in (exact("a", "ab"), exact("a", "ac"), exact("a", "ac")):  # 45 + 29 + 13
        assert not admission.is_full
        assert admission.fits(work) == (len(started) < 1)
        started.append((work, admission.start(work)))
    assert admission.is_full
    admission.end(*started.pop(), None)
    assert not admission.is_full
    for work, own in started:
        admission.end(work, own, None)
    admission.start(exact("b", num_tokens=80))
    assert not admission.is_full
    admission.start(exact("b", num_tokens=16, max_tokens=1))
    assert admission.is_full


def test_chunks_are_copies():
    admission = Admission(71)
    work = Work("", Item((("a", 16),), 40, 10), never, is_exact=False)
    own = admission.start(work)
    admission.start(work)
    assert admission.is_full
    admission.end(work, own, None)
    assert not admission.is_full


def test_answers_that_end_early_make_room():
    admission = Admission(100)
    work = exact(num_tokens=40, max_tokens=1000)
    admission.end(work, admission.start(work), None)
    assert not admission.is_full
    own = admission.start(work)
    assert admission.is_full
    admission.end(work, own, None)
    for _ in range(64):
        admission.end(short := exact(), admission.start(short), 5)
    admission.start(work)
    assert not admission.is_full
