import json
import subprocess
import sys

CAMPAIGN = (
    "import json, sys\n"
    "from ragkv.config import Config\n"
    "from ragkv.evals.experiment import Progress\n"
    "from ragkv.evals.parameters import Faults\n"
    "from ragkv.evals.robustness import faults\n"
    "wanted = Faults(*map(int, sys.argv[1:]))\n"
    "for row in faults.run(Config(), wanted, Progress()): print(json.dumps(row))"
)
WITHOUT_CHECKSUMS = "from ragkv.store import record; record._checksum = lambda *_: 0"
WITHOUT_CHECKS_OF_LENGTH = "from ragkv.store import table; table._Environment.check_length = lambda *_: None"
WITHOUT_DIFFERENCES = "from ragkv.store import difference; difference.split = lambda *_: None"
LOSES_PUTS_AND_DIES = (
    "import os; from ragkv.store.entries import EntryFolder; from ragkv.store.admin import StoreAdmin\n"
    "publish = EntryFolder.publish\n"
    "EntryFolder.publish = lambda self, files: 'kills' in str(self._folder) or publish(self, files)\n"
    "StoreAdmin.stats = lambda _: os.abort()"
)


def play(kills, flips, table=0, sabotage=""):
    """In a process of its own: it forks, and must have no threads."""
    command = [sys.executable, "-c", f"{sabotage}\n{CAMPAIGN}", *map(str, (kills, flips, table))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {row["part"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_the_store_survives_and_the_command_says_so():
    command = [
        sys.executable,
        "-m",
        "ragkv",
        "eval",
        "faults",
        "--kills",
        "3",
        "--flips",
        "30",
        "--table",
        "3",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, damage, *table, disk = map(json.loads, done.stdout.splitlines())
    assert [row["rounds"] for row in table] == [3] * 8
    assert kills["outcomes"] == {"compactor": 1, "indexer": 1, "reader": 1}
    assert damage["outcomes"]["unharmed"] and damage["outcomes"]["missed"]
    assert disk["outcomes"] == {"held": 1} or "can't mount" in disk["skipped"]


def test_wrong_values_are_found():
    failures = play(0, 10, sabotage=WITHOUT_CHECKSUMS)["damage"]["failures"]
    assert any("wrong value" in failure["problem"] for failure in failures)
    assert all(failure["seed"] in range(10) for failure in failures)


def test_wrong_differences_are_found():
    failures = play(0, 2, sabotage=WITHOUT_DIFFERENCES)["damage"]["failures"]
    assert [failure["problem"].partition("wrong value")[1] for failure in failures] == ["wrong value"] * 2


def test_a_process_that_a_table_ends_is_counted_and_the_next_one_starts():
    rows = play(0, 0, 6, sabotage=WITHOUT_CHECKS_OF_LENGTH)
    while_open = rows["uses: cut off, while open"]
    assert while_open["outcomes"]["ended the process"] and while_open["failed"] == 0
    assert rows["uses: cut off, at rest"]["failed"] == 0


def test_lost_chunks_and_processes_that_die_are_found():
    rows = play(1, 1, sabotage=LOSES_PUTS_AND_DIES)
    (lost,), (dead,) = rows["kills"]["failures"], rows["damage"]["failures"]
    assert "acknowledged was" in lost["problem"]
    assert "died by signal 6" in dead["problem"] and dead["seed"] == 0
