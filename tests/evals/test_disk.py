"""What `ragkv eval store` says of a small store."""

import json

import pytest
from typer.testing import CliRunner

from ragkv import cli
from ragkv.config import Config
from ragkv.evals.experiment import Progress
from ragkv.evals.parameters import Store
from ragkv.evals.workloads import disk
from ragkv.store.record import CorruptRecordError


@pytest.fixture
def rows(tmp_path):
    found = list(disk.run(Config(home=tmp_path / "home"), Store((64, 256), mib=4, churn=2, repeats=1), Progress()))
    assert not list((tmp_path / "home").iterdir())  # nothing is left behind
    return found


def test_every_way_is_measured_and_what_was_replaced_is_off_the_disk(rows):
    for row, kib in zip(rows, (64, 256), strict=True):
        assert row["record_kib"] == kib and row["chunks"] == (4 << 10) // (kib * 8)
        assert all(row[way] > 0 for way in ("write", "churn", "cold", "warm", "memory", "copy", "checksum"))
        assert 3 <= row["record_mib"] <= row["file_mib"] <= 5


def test_damage_is_not_measured_over(tmp_path, monkeypatch):
    write = disk.DiskStore.put

    def put_and_damage(store, chunks):
        chunks = list(chunks)
        write(store, chunks)
        file, offset, length = store.admin.locate(chunks[0][0], 3)
        with file.open("r+b") as bytes_:
            bytes_.seek(offset + length // 2)
            bytes_.write(b"damage")

    monkeypatch.setattr(disk.DiskStore, "put", put_and_damage)
    with pytest.raises(CorruptRecordError):
        list(disk.run(Config(home=tmp_path), Store((64,), mib=1, churn=0, repeats=1), Progress()))


def test_the_command(tmp_path):
    done = CliRunner().invoke(
        cli.app, ["eval", "store", "--records", "64", "--mib", "1", "--churn", "0", "--home", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, done.stdout.splitlines())
    assert row["record_kib"] == 64 and "churn" not in row
