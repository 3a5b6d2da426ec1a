"""What is left of processes that are ended at once: nothing, and no complaint."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

PROGRAM = textwrap.dedent("""
    import multiprocessing, os, sys, time
    from multiprocessing.shared_memory import SharedMemory
    from ragkv.cli.session import stoppable

    context = multiprocessing.get_context("spawn")

    def share(names, depth):
        memory, lock = SharedMemory(create=True, size=1 << 16), context.Lock()
        if depth:
            context.Process(target=share, args=(names, depth - 1)).start()
        names.put((os.getpid(), memory.name, lock._semlock.name))
        time.sleep(300)

    if __name__ == "__main__":
        names = context.SimpleQueue()
        with stoppable():
            context.Process(target=share, args=(names, 1)).start()
            print(*names.get(), *names.get(), flush=True)
            time.sleep(300)
""")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_processes_and_what_they_shared_are_gone(tmp_path: Path, signum: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        child, memory, lock, grandchild, *more = process.stdout.readline().split()
        files = [Path("/dev/shm") / name for name in (memory, more[0], f"sem.{lock[1:]}", f"sem.{more[1][1:]}")]
        assert all(file.exists() for file in files)
        process.send_signal(signum)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 128 + signum
    assert not any(file.exists() for file in files)
    assert not psutil.pid_exists(int(child)) and not _runs(int(grandchild))


def _runs(pid: int) -> bool:
    """An orphan may wait to be reaped."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
