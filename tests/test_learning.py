"""Which passages of prompts are precomputed, when, and for whom they are found. vLLM is a list of what it is given."""

import random

import pytest
import torch
from tiny_tokenizer import CHATML, save_tokenizer

from ragkv import learning
from ragkv.config import LearningConfig
from ragkv.engine.task import MeanTask, PrecomputeTask, Report
from ragkv.errors import StoreError
from ragkv.home import Home, Owner
from ragkv.learning import Learner
from ragkv.retriever.chunking import ChunkText
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import LayerKV
from ragkv.stored_chunks import StoredChunks

MODEL, HEADS = f"{8:032x}", (0, 2)


class Served:
    """A home, and a server whose clients ask for prompts; what is computed for us is stored as the worker would."""

    def __init__(self, folder, num_contexts=3, joins=False, **settings):
        model = folder / "model"
        save_tokenizer(model, CHATML)
        self.home = Home(folder / "home")
        self.store = DiskStore(self.home.kv)
        self.stored = StoredChunks(self.home, model, MODEL, HEADS, num_contexts, joins=joins, learns=True)
        self.submitted = []
        self.learner = Learner(LearningConfig(on=True, **settings), self.stored, self.submit, 4096)
        self.num = 0

    def submit(self, token_ids, task):
        self.submitted.append((token_ids, task))
        return True

    def arrive(self, token_ids, salt=None):
        self.num += 1
        self.learner.arrived(str(self.num), token_ids, salt)
        return str(self.num)

    def ask(self, token_ids, salt=None):
        """Ask, and have all work done that it gives."""
        self.learner.finished(self.arrive(token_ids, salt))
        return self.work()

    def work(self, report=None):
        done = []
        while self.submitted:
            token_ids, task = self.submitted.pop(0)
            self.compute(token_ids, task)
            done.append(task)
            self.learner.computed(report or Report())
        return done

    def compute(self, token_ids, task):
        span = task.span
        layers = [LayerKV(torch.ones(2, span.end - span.start, 8), torch.ones(2, span.end - span.start, 8), 0)] * 2
        kv = self.stored._documents.kv
        assert len(token_ids) == span.end
        self.store.put([(kv.key(span), layers)])

    def found(self, token_ids, salt=None):
        return [(span.start, span.end) for span in self.stored.standing(token_ids, salt)]


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


@pytest.fixture
def draw():
    drawing = random.Random(7)
    return lambda count: [drawing.randrange(200) for _ in range(count)]


def test_a_passage_is_precomputed_after_the_anchor_and_others_and_found_then(served, draw):
    a, b = draw(100), draw(150)
    assert served.ask([*draw(30), *a, *draw(20), *b]) == []
    tasks = served.ask([*draw(40), *b, *draw(7), *a, *draw(10)])
    assert [type(task) for task in tasks] == [PrecomputeTask] * 3 + [MeanTask] * 2  # the anchor, then both passages
    assert all(len(context) == 1 for task in tasks[3:] for context in task.contexts) and tasks[3].contexts
    prompt = [*draw(3), *a, *draw(5), *b, *draw(9)]
    assert served.found(prompt) == [(3, 103), (108, 258)]
    assert served.ask(prompt) == []
    catalog = served.stored.learnt_by(None).catalog
    assert [info.num_tokens for info in catalog.documents()] in ([100, 150], [150, 100])
    assert [served.learner.take_num_learnt() for _ in range(2)] == [2, 0]
    served.home.check_owner(Owner("model", MODEL, "any embedder"))
    with pytest.raises(StoreError, match="indexed with the model model"):
        served.home.check_owner(Owner("other", "9" * 32, "any embedder"))


def test_what_recurs_for_one_salt_is_nobody_elses(served, draw):
    passage = draw(100)
    for salt in ("ours", "theirs", None):
        assert served.ask([*draw(30), *passage], salt) == []
    assert served.ask([*draw(31), *passage], "ours")
    prompt = [*draw(5), *passage, *draw(5)]
    assert served.found(prompt, "ours") == [(5, 105)]
    assert served.found(prompt, "theirs") == served.found(prompt) == []
    assert "learnt" not in served.home.tenants()
    hashes = {span.chunk_hash for span in served.stored.standing(prompt, "ours")}
    served.ask(prompt, "theirs")
    assert not hashes & {span.chunk_hash for span in served.stored.standing(prompt, "theirs")}
    assert served.found(prompt, "theirs") == [(5, 105)]


def test_nothing_is_computed_while_a_client_waits(served, draw):
    passage = draw(100)
    served.ask([*draw(30), *passage])
    waiting = served.arrive(draw(100))
    assert served.ask([*draw(20), *passage]) == []
    served.learner.finished(waiting)
    assert len(served.submitted) == 1
    busy = served.arrive(draw(100))
    assert len(served.work()) == 2  # the anchor and what was begun with it
    assert served.found(passage) == []
    served.learner.finished(busy)
    served.work()
    assert served.found(passage) == [(0, 100)]


def test_after_a_failure_nothing_is_learnt_for_a_while(served, draw, monkeypatch, caplog):
    passage = draw(100)
    served.ask([*draw(30), *passage])
    served.learner.finished(served.arrive([*draw(20), *passage]))
    assert len(served.work(Report(failed=True, problem="no space"))) == 1
    assert "learnt for 60 s" in caplog.text
    assert served.ask([*draw(10), *passage]) == []
    later = learning.time.monotonic() + 61
    monkeypatch.setattr(learning.time, "monotonic", lambda: later)
    assert served.ask([*draw(10), *passage])


def test_no_more_is_learnt_than_the_budget_allows(tmp_path, draw):
    served = Served(tmp_path, num_contexts=1, tokens_per_hour=250)
    passages = [draw(100) for _ in range(4)]
    served.ask([token for each in passages for token in [*each, *draw(3)]])
    served.ask([token for each in passages[::-1] for token in [*each, *draw(4)]])
    assert sum(bool(served.found(passage)) for passage in passages) == 2
    frozen = Served(tmp_path / "frozen", tokens_per_hour=0)
    frozen.ask([1, *passages[0]])
    assert frozen.ask([2, *passages[0]]) == []


def test_nearly_the_same_passage_is_learnt_once(served, draw):
    passage, tail = draw(200), draw(6)
    served.ask([*draw(30), *passage, *tail])
    busy = served.arrive(draw(50))
    served.ask([*draw(31), *passage, *tail, 1])
    served.ask([*draw(32), *passage, *draw(40)])
    served.learner.finished(busy)
    served.work()
    assert len(served.stored.learnt_by(None).catalog.documents()) == 1
    assert served.found([*draw(3), *passage, *draw(40)]) == [(3, 203)]


def test_documents_and_what_was_learnt_are_found_beside_each_other(served, draw):
    passage, text = draw(100), draw(120)
    served.ask([*draw(30), *passage])
    served.ask([*draw(31), *passage])
    with served.home.open_catalog() as catalog:
        catalog.put_document("a", "", "", [ChunkText("", tuple(text))], [[1.0]])
    prompt = [*draw(3), *text, *passage]
    assert served.found(prompt) == [(123, 223)]  # the document's KV isn't stored
    documents = served.stored._documents
    for span in documents.find(prompt):
        served.store.put([(documents.kv.key(span), [LayerKV(torch.ones(2, 120, 8), torch.ones(2, 120, 8), 0)] * 2)])
    assert served.found(prompt) == [(3, 123), (123, 223)]
    assert served.found(prompt, "a salt") == []


def test_the_first_chunk_is_found_once_its_kv_behind_the_beginning_is_there(served, draw):
    first, second, beginning = draw(100), draw(150), draw(30)
    served.ask([*draw(20), *first, *draw(20), *second])
    served.ask([*draw(21), *second, *draw(20), *first])
    tasks = []
    for question in (draw(9), draw(9)):
        prompt = [*beginning, *first, *draw(5), *second, *question]
        spans = [(span.start, span.end) for span in served.stored.find(prompt, None)]
        assert spans == [(135, 285)]  # a mean isn't what the first chunk's KV is
        tasks.append(served.ask(prompt))
    assert tasks[0] == []  # nobody else has begun like that
    task, other = tasks[1]  # the other may come first another time
    assert isinstance(task, PrecomputeTask) and (task.span.start, task.span.end) == (30, 130)
    assert isinstance(other, PrecomputeTask) and (other.span.start, other.span.end) == (30, 180)
    prompt = [*beginning, *first, *draw(7), *second, *draw(9)]
    assert served.stored.find(prompt, None)[0] == task.span
    assert served.ask(prompt) == []
    elsewhere = [*draw(30), *first, *second]
    assert [(span.start, span.end) for span in served.stored.find(elsewhere, None)] == [(130, 280)]
    far = [*draw(300), *first, *second]
    assert [(span.start, span.end) for span in served.stored.find(far, None)] == [(300, 400), (400, 550)]


def test_a_chunk_that_is_deleted_meanwhile_leaves_nothing(served, draw):
    text, beginning = draw(120), draw(30)
    kv = served.stored._documents.kv
    with served.home.open_catalog() as catalog:
        catalog.put_document("a", "", "", [ChunkText("", tuple(text))], [[1.0]])
        (hash,) = catalog.chunk_hashes()
        span = kv.span(hash, len(text))
        for each in (span, kv.averaged(span)):
            served.compute([0] * span.end, PrecomputeTask(each))
        for _ in range(2):
            served.learner.finished(served.arrive([*beginning, *text, *draw(9)]))
        ((_, task),) = served.submitted
        assert task.span.chunk_hash == hash and task.span.start == len(beginning)
        catalog.delete_document("a")
    served.store.delete([hash])
    served.work()
    assert served.stored.entries.keys_of(hash) == []
