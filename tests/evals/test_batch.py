"""The rows of `ragkv eval batch`, and their picture."""

import asyncio

import pytest

from ragkv.batch.sharing import Item
from ragkv.batch.work import Outcome, Work
from ragkv.evals import tables
from ragkv.evals.experiment import Progress
from ragkv.evals.workloads import batch


class Memory:
    """An engine whose memory for KV is in use to a tenth for each request that it has answered."""

    kv_tokens = 1024

    def __init__(self):
        self.answered = 0

    async def forget_prefixes(self):
        self.answered = 0

    def account(self):
        return self.answered / 10, self.answered // 4

    def request(self, number, num_reused):
        async def ask():
            await asyncio.sleep(0.05)
            self.answered += 1
            return Outcome({"tokens": [number]}, 100, num_reused, 1)

        return Work(f"{number}", Item((), 100, 1), run=ask)


@pytest.fixture
def row(monkeypatch):
    engine = Memory()
    monkeypatch.setattr(batch, "kv_account", engine.account)
    monkeypatch.setattr(batch, "_SAMPLED_S", 0.01)
    ordered = [engine.request(i, 60) for i in range(8)]
    arrival = [engine.request(i, 0) for i in (*range(7), 8)]
    arrival[-1] = Work("7", arrival[-1].item, run=arrival[-1].run)  # which answers otherwise
    mix = batch._Mix("eight requests", ordered, arrival)
    return asyncio.run(batch._compare(engine, mix, 2, Progress()))


def test_both_orders_are_counted_over_time(row):
    assert (row["requests"], row["ordered_computed"], row["arrival_computed"]) == (8, 320, 800)
    assert (row["ordered_preemptions"], row["answers_that_differ"]) == (2, 1)
    assert row["ratios"] == sorted(row["ratios"]) and len(row["ratios"]) == 2
    for arm in ("ordered", "arrival"):
        seconds, kv_use = row[f"{arm}_course"]["seconds"], row[f"{arm}_course"]["kv_use"]
        assert len(seconds) == len(kv_use) > 2 and seconds == sorted(seconds)
        assert kv_use == sorted(kv_use) and kv_use[0] == 0.0
        assert row[f"{arm}_kv_peak"] == max(kv_use)


def test_the_memory_of_each_mix_is_drawn(row, tmp_path, capsys):
    four = [row | {"mix": f"mix {i}"} for i in range(4)]
    batch.draw(four, tmp_path / "new" / "batch.png")
    assert (tmp_path / "new" / "batch.png").read_bytes().startswith(b"\x89PNG")
    tables.batch(four)
    assert "mix 3" in capsys.readouterr().out
