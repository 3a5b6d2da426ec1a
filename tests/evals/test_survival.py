"""The loop that asks again what a killed engine hadn't answered, and what damages a file."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from ragkv.errors import EngineStoppedError
from ragkv.evals import parameters
from ragkv.evals.robustness import prefix_damage, survival
from ragkv.evals.robustness.faults import Part, Round
from ragkv.evals.robustness.victim import note


class Victim:
    """Answers with the question's last token; breaks off those that are asked before it is started again."""

    def __init__(self, broken=(), error=None):
        self.broken, self.error = set(broken), error or EngineStoppedError("ended")
        self.asked, self.events = [], []

    async def ask(self, token_ids, max_tokens):
        self.asked.append(token_ids[-1])
        await asyncio.sleep(0)
        if token_ids[-1] in self.broken:
            raise self.error
        return SimpleNamespace(token_ids=(token_ids[-1],))

    def kill(self):
        self.events.append("kill")

    async def restart(self):
        self.events.append("restart")
        self.broken = set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(survival, "_LONGEST_S", 0)


def survive(victim, event):
    answers = asyncio.run(survival._survive(victim, [[1], [2], [3]], 4, event, random.Random(0)))
    return [answer.token_ids for answer in answers]


def test_what_was_lost_is_asked_again_in_its_place():
    victim = Victim(broken=[2])
    assert survive(victim, "kill") == [(1,), (2,), (3,)]
    assert victim.events == ["kill", "restart"] and victim.asked == [1, 2, 3, 2]


def test_nothing_may_be_lost_without_a_kill():
    with pytest.raises(EngineStoppedError):
        survive(Victim(broken=[2]), "nothing")


def test_no_other_error_passes():
    with pytest.raises(ValueError, match="wrong"):
        survive(Victim(broken=[2], error=ValueError("wrong")), "kill")


def test_a_wrong_answer_is_a_failure():
    part = Part("kind")
    note(part, Round(0, "from the disk"))
    note(part, Round(1, "computed", "(1,) and not (2,)"))
    assert part.row()["rounds"] == 2 and part.row()["failed"] == 1
    assert part.row()["outcomes"] == {"computed": 1, "from the disk": 1}


def test_damages_are_chosen_by_name():
    assert parameters._damages("a full disk, a lost file") == ("a full disk", "a lost file")
    with pytest.raises(ValueError, match="'a fire' is none of: a flipped bit, "):
        parameters._damages("a lost file,a fire")


def test_damages_change_a_file(tmp_path):
    file = tmp_path / "entry"
    for i in range(20):
        file.write_bytes(bytes(1000))
        prefix_damage._flip(file, random.Random(i))
        assert sum(byte.bit_count() for byte in file.read_bytes()) == 1
        prefix_damage._cut(file, random.Random(i))
        assert file.stat().st_size < 1000
    prefix_damage._lose(file, random.Random(0))
    assert not file.exists()
