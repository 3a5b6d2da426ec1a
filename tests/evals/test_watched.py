"""Processes that an evaluation started."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ragkv.evals.watched import at_rest

PARENT = """
import os, signal, sys
from ragkv.evals.watched import watched
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and all that it starts
with watched([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ)) as process:
    print(process.pid, flush=True)
    process.wait()
"""


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGINT])
def test_none_is_left(signal_) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            assert child.is_running()
            os.kill(parent.pid, signal_)
            assert parent.wait(30) != 0
        finally:
            parent.kill()
        assert child.wait(30) is None and not child.is_running()


def wait_until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_takes_no_time_while_at_rest() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child, subprocess.Popen(["true"]) as ended:
        process, gone = psutil.Process(child.pid), psutil.Process(ended.pid)
        ended.wait()
        try:
            with at_rest([process, gone]):
                wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
            wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
        finally:
            child.kill()
