"""`ragkv eval broken-batch`: a batch whose process is killed again and again, next to the same batch left alone.

Both are `ragkv batch`, in processes of their own, over the same file of tweets, each with a question about it. A kill
comes when a random number of answers is there, and takes vLLM's processes too.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ragkv.config import Config
from ragkv.errors import ConfigError, ModelError
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import BrokenBatch
from ragkv.evals.watched import as_environment, watched, with_models

_KINDS = ("a question", "praise", "a complaint", "news", "a joke")
_LOOKED_S = 0.05
_LATEST_S = 1.0  # from the answer on at which a kill is due
_Answers = dict[str, tuple[int, str]]


def run(config: Config, wanted: BrokenBatch, progress: Progress) -> Iterator[Row]:
    """Yield one row. Raises ModelError if a batch doesn't end by itself, or left alone answers only some requests,
    ConfigError without data."""
    rng = random.Random(wanted.seed)
    with tempfile.TemporaryDirectory(prefix="ragkv-batch-") as name:
        folder = Path(name)
        requests, whole, broken = (folder / f"{file}.jsonl" for file in ("requests", "whole", "broken"))
        requests.write_text("".join(f"{json.dumps(each)}\n" for each in _requests(config, wanted)))
        environment = {**os.environ, **as_environment(config, with_models(folder / "home", config.home))}
        begin = time.monotonic()
        with (folder / "log").open("wb") as log:
            progress.update("left alone")
            _attempt(requests, whole, environment, log, None, 0.0)
            if (num_answers := _num_lines(whole)) != wanted.requests:
                last = _last_line(folder / "log")
                raise ModelError(
                    f"the batch that was left alone has {num_answers} of {wanted.requests} answers: {last}"
                )
            alone_s = time.monotonic() - begin
            kills = sorted(rng.sample(range(wanted.requests), wanted.kills))
            for i, number in enumerate([*kills, None]):
                progress.update("killed", i, wanted.kills)
                _attempt(requests, broken, environment, log, number, rng.uniform(0, _LATEST_S))
        expected, found = _answers(whole)[0], _answers(broken)
        differing = [id for id in expected if found[0].get(id) != expected[id]]
        yield {
            "requests": wanted.requests,
            "kills": len(kills),
            "killed_at": kills,
            "answers": len(found[0]),
            "twice": found[1],
            "missing": wanted.requests - len(found[0]),
            "failed": sum(status != 200 for status, _ in expected.values()),
            "differing": len(differing),
            "examples": [(id, expected[id], found[0].get(id)) for id in differing[:5]],
            "alone_s": round(alone_s, 1),
            "seconds": round(time.monotonic() - begin, 1),
        }


def _requests(config: Config, wanted: BrokenBatch) -> Iterator[dict[str, object]]:
    file = wanted.data / "tweeteval" / "test_text.txt"
    try:
        tweets = file.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"no tweets in {file}: {error.strerror}; name the folder by --data") from error
    if len(tweets) < wanted.requests:
        raise ConfigError(f"{file} has {len(tweets)} tweets, not {wanted.requests}: lower --requests")
    for i, tweet in enumerate(tweets[: wanted.requests]):
        prompt = f"Is this {_KINDS[i % len(_KINDS)]}? {tweet}\nAnswer:"
        body = {"model": config.model.name, "prompt": prompt, "max_tokens": wanted.tokens, "temperature": 0}
        yield {"custom_id": f"tweet-{i}", "method": "POST", "url": "/v1/completions", "body": body}


def _attempt(
    requests: Path, out: Path, environment: dict[str, str], log: IO[bytes], kill_at: int | None, later_s: float
) -> None:
    """Run the batch to its end, or kill it some seconds after it has so many answers."""
    command = [sys.executable, "-m", "ragkv", "batch", str(requests), "--out", str(out), "--json"]
    with watched(command, environment, log) as process:
        while process.poll() is None:
            if kill_at is not None and _num_lines(out) >= kill_at:
                time.sleep(later_s)
                os.killpg(process.pid, signal.SIGKILL)
                return
            time.sleep(_LOOKED_S)
        if kill_at is None and process.returncode not in (0, 1):
            raise ModelError(f"the batch ended with status {process.returncode}: {_last_line(Path(log.name))}")


def _num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _answers(file: Path) -> tuple[_Answers, int]:
    """Return each request's status and text, and how many requests have more than one answer."""
    found: _Answers = {}
    times = Counter[str]()
    for line in map(json.loads, file.read_text().splitlines()):
        response = line["response"]
        text = response["body"]["choices"][0]["text"] if response["status_code"] == 200 else ""
        found[line["custom_id"]] = response["status_code"], text
        times[line["custom_id"]] += 1
    return found, sum(number > 1 for number in times.values())
