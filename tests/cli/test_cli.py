"""The command line without a model: what it prints where, how it ends, and that it is quick."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ragkv
from ragkv import cli
from ragkv.answer import Answer, Delta, Reasoning, Source, Timings, Usage
from ragkv.cli import engine_commands, output
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, Config
from ragkv.evals import tables
from ragkv.home import Home, Owner
from ragkv.index.work import IngestProgress, IngestReport
from ragkv.policies import DESCRIPTIONS, Policy
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV
from ragkv.store.tier import open_tier

HEAVY = ("torch", "vllm", "transformers", "sentence_transformers", "fastapi", "ragkv.pipeline")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, with nothing else in the environment."""
    for name in [name for name in os.environ if name.startswith("RAGKV_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("RAGKV_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", str(Path(ragkv.__file__).parents[1]))
    return home


@pytest.fixture
def filled_home(home: Path) -> Path:
    store = DiskStore(home / "kv")
    for chunk in (1, 2):
        key = ChunkKey(f"{chunk:032x}", f"{7:032x}", f"{8:032x}", heads=(0, 2))
        store.put([(key, [LayerKV(torch.ones(2, 5, 8), torch.ones(2, 5, 8), base_position=0)] * 3)])
    store.close()
    return home


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a user runs it."""
    command = [sys.executable, "-c", "from ragkv.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    """In this process, where that makes no difference."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def corrupt_one_record(store: Path) -> None:
    with min(store.glob("v5/*/*.kv")).open("r+b") as file:
        file.seek(4096 + 200)
        byte = file.read(1)[0]
        file.seek(4096 + 200)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("arguments", [["--help"], ["ask", "--help"], ["--version"], ["store", "--help"]])
def test_help_loads_nothing_heavy(home: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from ragkv.cli import main\n"
        "try: main()\n"
        f"finally: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_version(home: Path) -> None:
    assert invoke("--version") == (0, f"ragkv {ragkv.__version__}\n", "")


def test_every_command_is_listed(home: Path) -> None:
    listed = invoke("--help")[1]
    assert all(name in listed for name in ("index", "ask", "serve", "store", "models", "eval", "doctor"))


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["ask"], ["index"], ["ask", "x", "--nonsense"], ["ask", "x", "--top-k", "many"], ["store", "burn"]],
)
def test_usage_errors_end_with_2(home: Path, arguments: list[str]) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "") and err


@pytest.mark.parametrize("lengths", ["", "1,x", "0", "10,-5"])
def test_lengths_that_are_none(home: Path, lengths: str) -> None:
    code, out, err = invoke("eval", "ttft", "--tokens", lengths)
    assert (code, out) == (2, "") and "is not a list of positive numbers" in err


def errors(*arguments: str | Path) -> list[str]:
    """The lines of the error that a command must end with, having printed nothing else."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    return done.stderr.removeprefix("error: ").splitlines()


def test_unknown_policy(home: Path) -> None:
    expected = [f"unknown policy 'cachblend'; choose one of {', '.join(DESCRIPTIONS)}"]
    assert errors("ask", "who?", "--policy", "cachblend") == expected
    assert errors("eval", "ttft", "--policies", "none,cachblend:0.1") == expected


def test_unknown_collection(home: Path) -> None:
    expected = ["unknown dataset 'squad'; choose mtrag, xquad, or xquad in another language as xquad.de"]
    assert errors("eval", "retrieval", "--dataset", "squad", "--data", home) == expected


def test_budget_out_of_range(home: Path) -> None:
    (line,) = errors("ask", "who?", "--budget", "1.5")
    assert line == "answer.budget = 1.5 on the command line: Input should be less than or equal to 1"


def test_blank_question(home: Path) -> None:
    assert errors("ask", " \n") == ["the question is blank"]


def test_unknown_settings(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ragkv.toml"
    file.write_text("[server]\nprot = 1\nport = 0\n")
    first, second = errors("serve", "--config", file)
    assert first == f"server.port = 0 in {file}: Input should be greater than or equal to 1"
    assert (
        second
        == f"unknown setting server.prot in {file}; choose from host, port, keys, operator_keys, max_requests, log, "
        "max_upload_mib, max_pause_s, indexing_patience_s"
    )
    assert errors("doctor", "--config", tmp_path / "no.toml")[0].startswith("can't read the settings file")
    monkeypatch.setenv("RAGKV_NONSENSE", "1")
    assert errors("store", "stats")[0].startswith("RAGKV_NONSENSE in the environment is not a setting")


@pytest.mark.parametrize("command", ["ask", "index", "serve"])
def test_missing_model_is_told_at_once(home: Path, command: str) -> None:
    arguments = {"ask": ["who?"], "index": [Path(__file__).parent], "serve": ["--port", str(free_port())]}
    (line,) = errors(command, *arguments[command])
    assert line.startswith(f"The embedded model {EMBEDDED_MODEL!r} is not in {home}") and "ragkv models fetch" in line
    (line,) = errors(command, *arguments[command], "--model", home / "no")
    assert line.startswith(f"No model '{home / 'no'}': there is no such folder")


def test_port_in_use_is_told_before_anything_is_loaded(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (line,) = errors("serve", "--port", str(port))
    assert line.startswith(f"can't listen on 127.0.0.1:{port}: Address already in use; choose another with --host")


def test_serve_takes_a_settings_file(home: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        file = tmp_path / "ragkv.toml"
        file.write_text(f"[server]\nport = {port}\n")
        (line,) = errors("serve", "--config", file)
    assert line.startswith(f"can't listen on 127.0.0.1:{port}")


def test_serve_fetches_missing_models_once_it_knows_where_to_listen(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "no key is asked for" in errors("serve", "--fetch", "--host", "0.0.0.0", "--port", str(free_port()))[0]
    assert not home.exists()
    done = run("serve", "--fetch", "--port", str(free_port()))
    assert done.returncode == 1 and f"{EMBEDDED_MODEL}: downloading" in done.stderr
    assert "error: pip could not download" in done.stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_path_that_does_not_exist(home: Path, tmp_path: Path) -> None:
    (line,) = errors("index", tmp_path / "nowhere")
    assert f"{str(tmp_path / 'nowhere')!r} doesn't exist" in line


def test_a_home_that_cannot_be_written(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = errors("ask", "who?", "--home", tmp_path / "file")
    assert "choose another --home" in line


def test_store_stats(filled_home: Path) -> None:
    code, out, err = invoke("store", "stats", "--json")
    stats = json.loads(out)
    assert (code, err) == (0, "")
    assert (stats["num_chunks"], stats["num_records"]) == (2, 6)
    assert stats["file_bytes"] >= stats["size_bytes"] >= 6 * 2 * 2 * 5 * 8 * 4 and stats["pinned_bytes"] == 0
    code, out, _ = invoke("store", "stats")
    assert code == 0 and out.splitlines()[0].split() == ["chunks", "2"]
    assert stats["codecs"] == {"raw": 6} and out.splitlines()[2].split() == ["codecs", "raw", "6"]


def test_store_verify(filled_home: Path) -> None:
    assert invoke("store", "verify") == (0, "6 records checked, no problems\n", "")
    corrupt_one_record(filled_home / "kv")
    code, out, _ = invoke("store", "verify")
    assert (code, out.splitlines()) == (
        1,
        [f"chunk {1:032x} layer 0: checksum mismatch", "6 records checked, 1 problem"],
    )
    code, out, err = invoke("store", "verify", "--json")
    assert (code, err) == (1, "")
    assert json.loads(out) == {"num_records": 6, "problems": [f"chunk {1:032x} layer 0: checksum mismatch"]}


def test_store_export_and_import(filled_home: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "kv.export", tmp_path / "other"
    done = run("store", "export", file)
    assert (done.returncode, done.stdout) == (0, "2 chunks exported, 0.0 MiB\n") and "Exporting KV" in done.stderr
    done = run("store", "import", file, "--home", other)
    assert (done.returncode, done.stdout) == (0, "2 chunks imported, 0.0 MiB\n") and "Importing KV" in done.stderr
    code, out, _ = invoke("store", "import", file, "--home", other)
    assert (code, out) == (0, "0 chunks imported, 0.0 MiB, 2 were present already\n")
    assert invoke("store", "verify", "--home", other)[:2] == (0, "6 records checked, no problems\n")
    assert sorted(tmp_path.glob("kv.export*")) == [file]


def test_store_export_through_a_pipe(filled_home: Path, tmp_path: Path) -> None:
    program = f"{sys.executable} -c 'from ragkv.cli import main; main()'"
    command = f"{program} store export - | {program} store import - --home {tmp_path / 'other'}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 chunks imported, 0.0 MiB\n" and "2 chunks exported" in done.stderr
    assert invoke("store", "verify", "--home", tmp_path / "other")[:2] == (0, "6 records checked, no problems\n")


def test_store_export_and_import_leave_out_what_is_damaged(filled_home: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "kv.export", tmp_path / "other"
    assert invoke("store", "export", file)[0] == 0
    damaged = bytearray(file.read_bytes())
    damaged[2 * 512 + 300] ^= 1  # behind the headers of two members and the head of the first entry
    file.write_bytes(damaged)
    code, out, _ = invoke("store", "import", file, "--home", other)
    assert (code, out.splitlines()) == (
        1,
        [f"chunk {1:032x}: checksum mismatch", "1 chunk imported, 0.0 MiB, 1 problem"],
    )
    corrupt_one_record(filled_home / "kv")
    code, out, _ = invoke("store", "export", file)
    assert (code, out.splitlines()) == (
        1,
        [f"chunk {1:032x}: checksum mismatch", "1 chunk exported, 0.0 MiB, 1 problem"],
    )


def test_store_import_of_something_else(filled_home: Path, tmp_path: Path) -> None:
    other, text = tmp_path / "other", tmp_path / "notes.md"
    text.write_text("# Notes\n" * 1000)
    (line,) = errors("store", "import", text, "--home", other)
    assert line == f"{text} is not an export of a KV store; make one with `ragkv store export FILE`"
    (line,) = errors("store", "import", tmp_path / "none", "--home", other)
    assert line.startswith(f"can't read {tmp_path / 'none'}: No such file or directory")
    assert not other.exists()
    (line,) = errors("store", "export", tmp_path)
    assert line == f"{tmp_path} is a folder; name the file to write"
    (line,) = errors("store", "export", tmp_path / "none" / "file")
    assert line.startswith(f"can't write {tmp_path / 'none' / 'file'}: No such file or directory")


@pytest.fixture
def indexed_home(filled_home: Path) -> Path:
    """With a document of the first chunk of two."""
    home = Home(filled_home)
    with home.open_catalog() as catalog:
        home.claim(catalog, Owner("tiny", f"{8:032x}", "words"))
        tokens = (1, 2, 3)
        catalog.put_document("/papers/bees.md", "Bees", "", [ChunkText("wax", tokens)], np.ones((1, 4), np.float32))
    with closing(home.open_store()) as store:
        layers = [LayerKV(torch.ones(2, 5, 8), torch.ones(2, 5, 8), base_position=0)] * 3
        store.put([(ChunkKey(chunk_hash(tokens), f"{7:032x}", f"{8:032x}", heads=(0, 2)), layers)])
    return filled_home


def test_store_gc(indexed_home: Path) -> None:
    lines = ["2 chunks, 0.0 MiB: no document has it", "0.0 MiB would be freed"]
    code, out, err = invoke("store", "gc", "--dry-run")
    assert (code, out.splitlines(), err) == (0, lines, "")
    assert [part["num_chunks"] for part in json.loads(invoke("store", "gc", "--dry-run", "--json")[1])] == [2, 0, 0, 0]
    assert invoke("store", "gc")[1].splitlines() == [lines[0], "0.0 MiB freed"]
    assert invoke("store", "gc")[1] == "0.0 MiB freed\n"
    assert json.loads(invoke("store", "stats", "--json")[1])["num_chunks"] == 1


def test_store_delete(indexed_home: Path) -> None:
    assert errors("store", "delete", "/papers/bee.md") == [
        f"no document '/papers/bee.md' in {indexed_home}; the nearest by name: /papers/bees.md",
        "nothing was deleted",
    ]
    code, out, err = invoke("store", "delete", "/papers/bees.md")
    assert (code, out.splitlines(), err) == (0, ["deleted /papers/bees.md", "KV of 1 chunk deleted, 0.0 MiB"], "")
    assert json.loads(invoke("store", "stats", "--json")[1])["num_chunks"] == 2


def test_store_import_of_another_models_kv_is_told(indexed_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "kv.export"
    invoke("store", "export", file)
    with Home(indexed_home).open_catalog() as catalog:
        Home(indexed_home).claim(catalog, Owner("another", f"{9:032x}", "words"))
    assert "isn't used; `ragkv store gc`" not in invoke("store", "import", file)[2]  # nothing new came
    code, _, err = invoke("store", "gc")
    assert (code, err) == (0, "")
    assert "isn't used; `ragkv store gc` deletes it" in invoke("store", "import", file)[2]


def test_store_of_another_home(filled_home: Path, tmp_path: Path) -> None:
    assert errors("store", "stats", "--home", tmp_path / "other") == [
        f"there is no KV store in {tmp_path / 'other'}; `ragkv index PATH` makes one"
    ]
    assert not (tmp_path / "other").exists()


def test_store_of_another_version(filled_home: Path) -> None:
    (filled_home / "kv" / "v5").rename(filled_home / "kv" / "v99")
    assert "holds KV records of format 99" in errors("store", "verify")[0]


def test_models_fetch_of_models_that_are_there(home: Path) -> None:
    for name in (EMBEDDED_MODEL, EMBEDDED_EMBEDDER):
        (home / "models" / name).mkdir(parents=True)
        (home / "models" / name / "config.json").write_text("{}")
    code, out, _ = invoke("models", "fetch")
    assert code == 0
    assert out.splitlines() == [f"{n}: already in {home / 'models' / n}" for n in (EMBEDDED_MODEL, EMBEDDED_EMBEDDER)]


def test_models_fetch_of_an_unknown_model(home: Path) -> None:
    assert errors("models", "fetch", "gpt-99")[0].startswith("'gpt-99' is not an embedded model; these are: ")


def test_doctor(home: Path) -> None:
    code, out, _ = invoke("doctor")
    assert code == 1  # no models in this home
    assert "wrong" in out and "run `ragkv models fetch`" in out
    for name in (EMBEDDED_MODEL, EMBEDDED_EMBEDDER):
        (home / "models" / name).mkdir(parents=True)
        (home / "models" / name / "config.json").write_text("{}")
    code, out, _ = invoke("doctor")
    assert (code, "wrong" in out) == (0, False)


def test_what_children_print_stays_off_stdout_and_stderr(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from ragkv.cli.output import detach_streams\n"
        "detach_streams(Path(sys.argv[1]) if sys.argv[1:] else None)\n"
        "os.system('echo child; echo child >&2')\n"
        "print('own'); print('own error', file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(ragkv.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    log = tmp_path / "log"
    done = subprocess.run([*command, str(log)], capture_output=True, text=True, check=True, env=env)
    assert (done.stdout, done.stderr, log.read_text()) == ("own\n", "own error\n", "child\nchild\n")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert (done.stdout, done.stderr) == ("own\n", "child\nchild\nown error\n")


def make_answer(policy: str = "query:0.05", ttft_ms: float = 50.0, text: str = "[b]no markup[/b]") -> Answer:
    usage = Usage(prompt_tokens=2000, prefix_tokens=0, reused_tokens=1900, recomputed_tokens=100, completion_tokens=9)
    source = Source("/docs/a [red].md", "A [bold] title", chunk=3, ordinal=12, score=0.512, text="…")
    return Answer(text, [source], Policy.parse(policy), usage, Timings(ttft_ms=ttft_ms, load_ms=12.0), "stop")


def test_why_there_are_no_sources(capsys: pytest.CaptureFixture[str]) -> None:
    answer = replace(make_answer(), sources=[], fallback="3 of 3 sources left out: no room")
    output.print_sources(answer)
    output.print_timings([answer])
    found = capsys.readouterr().out
    assert "No sources.\n" in found and "fallback: 3 of 3 sources left out: no room" in found and "index" not in found


def test_sources_and_timings(capsys: pytest.CaptureFixture[str]) -> None:
    answer, baseline = make_answer(), make_answer("full", ttft_ms=400, text="[/nothing]")
    output.print_sources(answer)
    output.print_baseline(answer, baseline)
    output.print_timings([answer, baseline])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "/docs/a", "[red].md", "12", "0.512", "A", "[bold]", "title"] in lines
    assert ["[/nothing]"] in lines
    assert ["time", "to", "first", "token", "50.0", "ms", "400.0", "ms"] in lines
    assert ["reused", "1,900", "tokens", "1,900", "tokens"] in lines
    assert ["The", "first", "token", "came", "8.0", "times", "as", "fast."] in lines


def test_ingest_report(capsys: pytest.CaptureFixture[str]) -> None:
    rejected = ["'/docs/[x].md': it's empty"]
    output.print_ingest_report(
        IngestReport(documents_new=2, documents_removed=1, chunks_prefilled=7, rejected=rejected)
    )
    assert capsys.readouterr().out.splitlines() == [
        "Documents: 2 new, 1 removed, 1 rejected. Chunks prefilled: 7.",
        "rejected: '/docs/[x].md': it's empty",
    ]


def test_an_ingest_whose_hint_is_refused_says_why_and_fails(monkeypatch, tmp_path, capsys) -> None:
    async def refused(*_, **__):
        return IngestReport(documents_new=1, hint_refused="2 GiB would be pinned; [unpin] others")

    monkeypatch.setattr("ragkv.cli.engine_commands._index", refused)
    monkeypatch.setattr("ragkv.cli.engine_commands.prepare", lambda log, verbose: None)
    (tmp_path / "a.txt").write_text("one")
    code, out, err = invoke("index", tmp_path / "a.txt", "--hint", "pin", "--home", tmp_path / "home")
    assert (code, out) == (1, "Documents: 1 new. Chunks prefilled: 0.\n")
    assert err == "the hint isn't kept: 2 GiB would be pinned; [unpin] others\n"


def test_ingest_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with output.IngestBars() as bars:
        for done in range(4):
            bars.update(IngestProgress("load", done, 3, "[/x].md"))
        bars.update(IngestProgress("prefill", 1, 2, "a title"))
    precomputed = capsys.readouterr()
    assert precomputed.out == ""
    assert "Reading files" in precomputed.err and "3/3" in precomputed.err and "1/2" in precomputed.err


@pytest.mark.parametrize(("every_s", "lines"), [(0.0, ["0/3", "1/3", "2/3", "3/3"]), (3600.0, ["0/3"])])
def test_a_log_has_a_line_of_progress_now_and_then(capsys, monkeypatch, every_s, lines) -> None:
    monkeypatch.setattr("ragkv.cli.output._LINE_EVERY_S", every_s)
    with output.IngestBars() as bars:
        for done in range(4):
            bars.update(IngestProgress("load", done, 3, "a.md"))
    assert re.findall(r"^Reading files (\S+)$", capsys.readouterr().err, re.MULTILINE) == lines


def test_ttft_rows_fit_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = {
        "tokens": 7168,
        "policy": "query",
        "budget": 0.15,
        "ttft_ms": 1234.5,
        "baseline_ttft_ms": 12345.6,
        "speedup": 10.0,
        "cold": False,
        "reused_tokens": 6900,
        "recomputed_tokens": 268,
        "load_ms": 100.2,
        "probe_ms": 300.4,
        "recompute_ms": 800.6,
    }
    tables.ttft([row])
    expected = ["7,168", "query:0.15", "12,346", "1,234", "10.0×", "100", "300", "801", "6,900", "268"]
    assert capsys.readouterr().out.splitlines()[-1].split() == expected


STARTING = textwrap.dedent("""
    import multiprocessing, signal, time
    from ragkv.cli.session import stoppable

    def deaf():  # as a process is before its first step
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)

    with stoppable():
        children = [multiprocessing.Process(target=time.sleep, args=(300,)), multiprocessing.Process(target=deaf)]
        for child in children:
            child.start()
        try:
            print(*(child.pid for child in children), flush=True)
            while True:
                time.sleep(1)
        except BaseException:  # as some library might
            time.sleep(300)
""")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_start_is_stopped_at_once_with_its_processes(home: Path, signum: int, status: int) -> None:
    command = [sys.executable, "-c", STARTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        children = list(map(int, process.stdout.readline().split()))
        process.send_signal(signum)
        assert process.communicate(timeout=120)[1].count("Traceback") == 0
        assert process.returncode == status
    assert len(children) == 2 and all(_ends(child) for child in children)


def _ends(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":  # ended; nobody reaps orphans here
            return True
        time.sleep(0.05)
    return False


def test_reading_files_ends_with_the_bars() -> None:
    with output.IngestBars() as bars:
        bars.update(IngestProgress("load", 0, 2, "a"))
    with pytest.raises(KeyboardInterrupt):
        bars.update(IngestProgress("load", 1, 2, "b"))


def test_what_a_model_thinks_is_shown_apart_from_its_answer(capsys) -> None:
    class Thinking:
        async def answer(self, question, options):
            for event in (Reasoning("Hm."), Reasoning(" Yes."), Delta("Tea"), Delta(".")):
                yield event
            yield Answer("Tea.", [], Policy("full"), Usage(1, 0, 0, 1, 4), Timings(), "stop", reasoning="Hm. Yes.")

    answer = asyncio.run(engine_commands._answer(Thinking(), "who?", None, show=True))
    assert capsys.readouterr() == ("Tea.\n", "Hm. Yes.\n\n")
    asyncio.run(engine_commands._answer(Thinking(), "who?", None, show=False))
    output.print_cut(answer)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("text", "what"), [("Te", "cut off"), ("", "cut off while the model was still thinking")])
def test_an_answer_that_used_up_its_tokens_says_how_to_get_more(capsys, text, what) -> None:
    output.print_cut(Answer(text, [], Policy("full"), Usage(1, 0, 0, 1, 128), Timings(), "length"))
    assert capsys.readouterr().err == f"{what} after 128 tokens; --max-tokens allows more\n"


@pytest.fixture
def shared(tmp_path: Path, indexed_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which all that the home has is: three chunks, one of them a document's."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv("RAGKV_STORE__REMOTE", folder.as_uri())
    with closing(Home(indexed_home).open_store()) as store:
        tier = open_tier(store, Config().store)
        assert tier is not None and tier.send() == 0
        tier.close()
    return folder


def test_store_stats_tell_of_the_bucket(shared: Path) -> None:
    remote = json.loads(invoke("store", "stats", "--json")[1])["remote"]
    assert remote == {"url": shared.as_uri(), "problem": None, "pending_deletions": 0}
    assert f"remote       {shared.as_uri()} answers\n" in invoke("store", "stats")[1]
    (Path(os.environ["RAGKV_HOME"]) / "kv" / "remote" / "deletions" / ("0" * 32)).touch()
    assert "answers; 1 chunk to be deleted there" in invoke("store", "stats")[1]


def test_store_verify_remote_reads_the_bucket(shared: Path) -> None:
    assert invoke("store", "verify", "--remote") == (0, "9 records checked, no problems\n", "")
    file = next(path for path in shared.rglob("*.v5"))
    data = bytearray(file.read_bytes())
    data[4300] ^= 1
    file.write_bytes(data)
    code, out, _ = invoke("store", "verify", "--remote")
    assert code == 1 and f"in {shared.as_uri()}: checksum mismatch" in out and "6 records checked, 1 problem\n" in out
    assert invoke("store", "verify") == (0, "9 records checked, no problems\n", "")


def test_commands_refuse_to_run_without_the_bucket_that_the_home_has(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAGKV_STORE__REMOTE")
    for command in (["stats"], ["gc"], ["verify", "--remote"], ["delete", "/papers/bees.md"]):
        assert f"is also in {shared.as_uri()}" in errors("store", *command)[0]


def test_store_delete_reaches_the_bucket(shared: Path) -> None:
    assert len(list(shared.rglob("*.v5"))) == 3
    code, out, err = invoke("store", "delete", "/papers/bees.md")
    assert (code, err) == (0, "") and "KV of 1 chunk deleted" in out
    assert len(list(shared.rglob("*.v5"))) == 2


def test_store_gc_reaches_the_bucket(shared: Path) -> None:
    stranger = shared / ("5" * 32) / f"{'6' * 64}00000002.v5"
    stranger.parent.mkdir()
    stranger.write_bytes(b"x")  # of another home
    assert invoke("store", "gc")[0] == 0
    assert len(list(shared.rglob("*.v5"))) == 2  # what no document has went from both
    out = invoke("store", "gc", "--remote", "--dry-run")[1]
    assert f"1 chunk, 0.0 MiB: no document has it, in {shared.as_uri()}\n" in out and stranger.exists()
    assert invoke("store", "gc", "--remote")[0] == 0
    assert len(list(shared.rglob("*.v5"))) == 1 and not stranger.exists()


def test_what_needs_a_bucket_says_so(filled_home: Path) -> None:
    for command in ("verify", "gc"):
        assert errors("store", command, "--remote") == [
            "store.remote isn't set: name the bucket or the shared folder (RAGKV_STORE__REMOTE)"
        ]


def test_an_ingest_tells_what_the_bucket_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_ingest_report(IngestReport(documents_new=1, entries_fetched=3, entries_unsent=2, chunks_unreached=1))
    out, err = capsys.readouterr()
    assert out == "Documents: 1 new. Chunks prefilled: 0. Entries fetched: 3.\n"
    assert "2 entries not sent to store.remote yet; the next run sends the rest" in err
    assert "KV of 1 chunk that was deleted may still be in store.remote" in err
