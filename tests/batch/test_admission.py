"""How many requests of a batch are in the engine at a time."""

from ragkv.batch.admission import Admission
from ragkv.batch.sharing import Item
from ragkv.batch.work import Work


async def never():
    raise AssertionError("nothing runs here")


def exact(*names, num_tokens=40, max_tokens=10):
    return Work("", Item(tuple((name, 16) for name in names), num_tokens, max_tokens), never)


def test_shared_blocks_count_once():
    admission = Admission(95)
    first, second, third = exact("a", "ab"), exact("a", "ac"), exact("a", "ac")
    assert admission.fits(first)
    started = [(work, admission.start(work)) for work in (first, second)]
    assert admission.fits(third)  # 45 + 29 + 13
    started.append((third, admission.start(third)))
    assert not admission.fits(exact("a", "ac"))
    for work, needs in started:
        admission.end(work, needs, None)
    assert admission.fits(exact("b", num_tokens=90))
    assert not admission.fits(exact("b", num_tokens=91))


def test_chunks_are_copies():
    admission = Admission(100)
    work = Work("", Item((("a", 16),), 40, 10), never, is_exact=False)
    needs = admission.start(work)
    admission.start(work)
    assert not admission.fits(work)
    admission.end(work, needs, None)
    assert admission.fits(work)


def test_answers_that_end_early_make_room():
    admission = Admission(100)
    assert not admission.fits(exact(num_tokens=40, max_tokens=1000))
    for _ in range(64):
        work = exact()
        admission.end(work, admission.start(work), 5)
    assert admission.fits(exact(num_tokens=40, max_tokens=1000))
