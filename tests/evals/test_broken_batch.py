"""`ragkv eval broken-batch` with a batch that needs no model: what it counts, and what it doesn't accept."""

import json
import sys
from pathlib import Path

import pytest

from ragkv.config import Config
from ragkv.errors import ConfigError, ModelError
from ragkv.evals.experiment import Progress
from ragkv.evals.parameters import BrokenBatch
from ragkv.evals.robustness import broken_batch

_BATCH = """
import json, sys, time
from pathlib import Path
requests, out, home = (Path(text) for text in sys.argv[1:4])
assert (home / "models" / "a model").exists() and not (home / "documents").exists()
have = {json.loads(line)["custom_id"] for line in out.read_text().splitlines()} if out.exists() else set()
with out.open("a") as file:
    for number, line in enumerate(requests.read_text().splitlines()):
        asked = json.loads(line)
        if asked["custom_id"] in have or (sys.argv[4] == "lossy" and number == 2):
            continue
        text = asked["body"]["prompt"] + ("again" if have and sys.argv[4] == "fickle" else "")
        response = {"status_code": 200, "body": {"choices": [{"text": text}]}}
        file.write(json.dumps({"custom_id": asked["custom_id"], "response": response}) + "\\n")
        file.flush()
        time.sleep(0.02)
print("the last word", file=sys.stderr)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / "a model").touch()
    (tmp_path / "tweeteval").mkdir()
    (tmp_path / "tweeteval" / "test_text.txt").write_text("".join(f"tweet {i}\n" for i in range(40)))
    (tmp_path / "batch.py").write_text(_BATCH)
    monkeypatch.setattr(broken_batch, "_LATEST_S", 0.1)
    watched = broken_batch.watched

    def rows(kind, requests=40):
        def in_its_place(command, environment, errors):
            files = command[4], command[6], environment["RAGKV_HOME"]
            return watched([sys.executable, str(tmp_path / "batch.py"), *files, kind], environment, errors)

        monkeypatch.setattr(broken_batch, "watched", in_its_place)
        config = Config(home=Path(tmp_path / "home"))
        return list(broken_batch.run(config, BrokenBatch(tmp_path, requests, kills=3), Progress()))

    return rows


def test_a_batch_that_goes_on_has_every_answer_once(run):
    (row,) = run("good")
    assert (row["answers"], row["kills"], len(row["killed_at"])) == (40, 3, 3)
    assert (row["twice"], row["missing"], row["failed"], row["differing"]) == (0, 0, 0, 0)


def test_answers_that_change_are_counted(run):
    (row,) = run("fickle")
    assert row["differing"] > 0 and row["missing"] == 0
    assert all(expected != found for _, expected, found in row["examples"])
    json.dumps(row)


def test_a_batch_that_is_left_alone_has_to_answer_all(run):
    with pytest.raises(ModelError, match="39 of 40 answers: the last word"):
        run("lossy")


def test_more_than_there_are_tweets_is_an_error(run):
    with pytest.raises(ConfigError, match="has 40 tweets, not 41"):
        run("good", 41)
