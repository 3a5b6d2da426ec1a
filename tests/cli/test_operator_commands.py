"""What operators' commands print, and how they end, on a real home."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from operator_home import DOCUMENTS, ENTRY_BYTES, LAYERS, OTHER_MODEL, key_of, make_home
from typer.testing import CliRunner

from ragkv import cli
from ragkv.cli import output
from ragkv.config import StoreConfig
from ragkv.errors import RagKVError
from ragkv.store.prefixes import open_prefixes
from ragkv.store.tier import open_tier

BEES, TEA = "/papers/bees.md", "/papers/tea.md"
GIB = 1 << 30


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(output.out, "_width", 200)  # pytest-xdist has set COLUMNS before it was made
    return make_home(tmp_path / "home")


def invoke(*arguments, input=None):
    result = CliRunner().invoke(cli.app, ["store", *map(str, arguments)], input=input)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def as_json(*arguments):
    code, out, _ = invoke(*arguments, "--json")
    assert code == 0
    return json.loads(out)


def keys(home):
    with closing(home.open_store()) as store:
        return set(store.keys())


def test_lookup(home) -> None:
    code, out, _ = invoke("lookup")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and [line[1] for line in lines[1:]] == ["x.md", *sorted(DOCUMENTS["main"])]
    assert lines[0][:2] == ["tenant", "document"] and lines[2][:5] == ["main", BEES, "2", "of", "2"]
    (tea,) = as_json("lookup", TEA)
    assert tea["tiers"]["disk"] == {"num_chunks": 2, "size_bytes": 2 * ENTRY_BYTES} and tea["tiers"]["memory"] is None
    assert [each["name"] for each in as_json("lookup", "--tenant", "acme")] == ["x.md"]
    invoke("pin", TEA)
    (line,) = [line for line in invoke("lookup", "--tenant", "main")[1].splitlines() if BEES in line]
    assert line.split()[-2:] == ["pin", "1"]  # the chunk that it shares


@pytest.mark.parametrize("command", ["pin", "unpin", "warm", "demote", "clear", "recode --codec int8"])
def test_a_command_needs_documents_and_knows_them(home, command) -> None:
    for arguments in ([], ["--all", TEA], ["--all", "--tenant", "acme"]):
        with pytest.raises(RagKVError, match="say which documents: their names, a --tenant, or --all alone"):
            invoke(*command.split(), *arguments)
    with pytest.raises(RagKVError, match=r"no document '/papers/bee.md' in .*; the nearest .*bees.md.*\nnothing was"):
        invoke(*command.split(), TEA, "/papers/bee.md")
    with pytest.raises(RagKVError, match="tenants with documents: main, acme\nnothing was changed"):
        invoke(*command.split(), "--tenant", "zeta")
    assert len(keys(home)) == 10


def test_pin_and_unpin(home, monkeypatch) -> None:
    code, out, _ = invoke("pin", TEA)
    assert (code, out.splitlines()) == (
        0,
        ["pinned 2 chunks of 1 document", "pinned now   0.1 MiB, no budget (store.disk_gib)"],
    )
    monkeypatch.setenv("RAGKV_STORE__DISK_GIB", str(4 * ENTRY_BYTES / GIB))
    with pytest.raises(RagKVError, match=r"GiB would be pinned with these \(.* are already\), and store.disk_gib is"):
        invoke("pin", "--all")
    assert as_json("unpin", TEA)["pinned_bytes"] == ENTRY_BYTES
    monkeypatch.delenv("RAGKV_STORE__DISK_GIB")
    invoke("pin", "/papers")
    assert f"what they share with pinned documents stays pinned: {TEA}" in invoke("unpin", BEES)[1]


def test_warm_and_demote(home) -> None:
    invoke("demote", "--all")
    code, out, err = invoke("warm", TEA)
    assert (code, out) == (0, "in the page cache: 2 entries of 1 document, 0.1 MiB\n") and "Warming KV" in err
    code, out, _ = invoke("demote", "--tenant", "acme")
    assert code == 0 and out.startswith("dropped from the page cache: ") and out.endswith(" of 1 document\n")


def test_recode(home) -> None:
    with pytest.raises(RagKVError, match="unknown codec 'zip'"):
        invoke("recode", "--codec", "zip", "--all")
    with pytest.raises(RagKVError, match="nothing can be encoded as 'raw' again"):
        invoke("recode", "--codec", "raw", "--all")
    code, out, err = invoke("recode", "--codec", "int8", TEA)
    assert (code, out.splitlines()[0]) == (0, "2 entries encoded as int8") and "Encoding as int8" in err
    code, out, _ = invoke("recode", "--codec", "int8", "/papers/bees.md")
    assert out.startswith("1 entry encoded as int8, the two entries of 1 chunk joined, 1 had it already")
    done = as_json("recode", "--codec", "int8", "--all")
    assert (done["num_recoded"], done["num_same"]) == (5, 4) and done["bytes_after"] < done["bytes_before"]
    code, out, _ = invoke("recode", "--codec", "fp8", "--all")
    assert code == 1 and "9 entries stay: they would get no smaller" in out
    assert as_json("stats")["codecs"] == {"int8": 18} and as_json("verify")["problems"] == []


def test_recode_names_what_is_damaged(home) -> None:
    with closing(home.open_store()) as store:
        store.entries.path(key_of("one")).write_bytes(b"nothing")
    code, out, _ = invoke("recode", "--codec", "int8", "all.jsonl#1", "all.jsonl#2")
    assert code == 1 and "it is damaged; `ragkv store verify` says how" in out and "1 entry encoded" in out


def test_clear(home) -> None:
    code, out, _ = invoke("clear", BEES, "--dry-run")
    assert (code, out) == (0, "KV of 1 chunk would be cleared, 0.1 MiB; 1 kept, other documents share them\n")
    assert len(keys(home)) == 10
    assert invoke("clear", BEES)[1] == "KV of 1 chunk cleared, 0.1 MiB; 1 kept, other documents share them\n"
    assert key_of("wax") not in keys(home) and len(as_json("lookup")) == 5
    assert as_json("clear", "--tenant", "acme")["num_chunks"] == 2


def test_everything_is_cleared_after_a_question(home) -> None:
    for answer in ("n\n", "\n", ""):  # at last nobody answers
        with pytest.raises(RagKVError, match="nothing was cleared; answer y, or give --yes"):
            invoke("clear", "--all", input=answer)
    assert "would be cleared" in invoke("clear", "--all", "--dry-run")[1]
    assert len(keys(home)) == 10
    assert invoke("clear", "--all", "--yes")[0] == 0 and keys(home) == set()
    make_home(home.path)
    code, out, err = invoke("clear", "--all", input="y\n")
    assert (code, err) == (0, f"Clear all KV of {home.path}, 0.4 MiB? [y/N] ") and out.startswith("KV of 8 chunks")
    assert keys(home) == set()


def test_clear_a_model(home) -> None:
    with pytest.raises(RagKVError, match="leave out documents, --tenant and --all"):
        invoke("clear", "--model", "other", "--all")
    assert as_json("clear", "--model", "other", "--dry-run")["num_chunks"] == 1
    assert invoke("clear", "--model", OTHER_MODEL[:8])[1].startswith("KV of 1 chunk cleared")
    with pytest.raises(RagKVError, match="means 0 models"):
        invoke("clear", "--model", OTHER_MODEL[:8])


def test_clear_reaches_the_bucket_unless_it_is_told_not_to(home, tmp_path, monkeypatch) -> None:
    (tmp_path / "bucket").mkdir()
    url = (tmp_path / "bucket").as_uri()
    monkeypatch.setenv("RAGKV_STORE__REMOTE", url)
    with closing(home.open_store()) as store, closing(open_tier(store, StoreConfig(remote=url))) as tier:
        tier.send()
    num_objects = lambda: len([*(tmp_path / "bucket").rglob("*.v5")])  # noqa: E731
    assert as_json("clear", TEA, "--local")["remote"] is None and num_objects() == 10
    assert as_json("clear", "--model", "other", "--local")["num_chunks"] == 1 and num_objects() == 10
    assert f"what {url} has of it cleared too" in invoke("clear", TEA, "all.jsonl")[1] and num_objects() == 7
    invoke("clear", "--model", "other")
    assert num_objects() == 6
    _, _, err = invoke("clear", "--all", input="y\n")
    assert f", and of these documents in {url}? [y/N]" in err and num_objects() == 0
    monkeypatch.delenv("RAGKV_STORE__REMOTE")
    with pytest.raises(RagKVError, match="what is deleted here would stay there"):
        invoke("clear", TEA)
    assert invoke("clear", TEA, "--local")[0] == 0


def test_health(home, monkeypatch) -> None:
    monkeypatch.setenv("RAGKV_STORE__DISK_GIB", "1")
    code, out, _ = invoke("health")
    assert code == 0 and out.splitlines()[0].split() == ["readable", "yes"]
    assert "of 1,024.0 MiB (store.disk_gib)" in out and "never (`ragkv store verify`)" in out
    assert "prefixes" not in out
    with closing(open_prefixes(home.prefixes, 1 << 30)) as prefixes:
        prefixes.put([(key_of("one"), LAYERS)])
    assert "(at most store.prefix_gib)" in invoke("health")[1]
    invoke("verify")
    assert "20 records, no problems" in invoke("health")[1]
    (home.kv / "v5" / "new").rmdir()
    (home.kv / "v5" / "new").touch()
    code, out, _ = invoke("health")
    assert code == 1 and out.splitlines()[1].split() == ["writable", "no"] and "can't open the KV store" in out
    code, out, _ = invoke("health", "--json")
    assert code == 1 and json.loads(out)["readable"] is False


def test_a_home_without_kv(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "none"))
    assert invoke("health")[0] == 1
    for command in ("lookup", "pin --all", "clear --all --yes"):
        with pytest.raises(RagKVError, match="there is no KV store in .*; `ragkv index PATH` makes one"):
            invoke(*command.split())
    assert not (tmp_path / "none").exists()
