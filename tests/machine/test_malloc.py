"""Memory that is freed goes back to the system, or stays until it is wanted again."""

import platform
import subprocess
import sys

import pytest

# A large block is freed once, so that glibc keeps those of its size from then on. Each thread then frees many, with
# small ones between them that stay.
_WORK = """
import sys, threading, numpy, psutil
from ragkv import machine as memory
if sys.argv[1:] == ["at once"]:
    memory.return_large_blocks()
numpy.ones(2 << 20)
kept = []
def work():
    large = []
    for _ in range(12):
        large.append(numpy.ones(1 << 18))
        kept.append(numpy.ones(1 << 9))
before = psutil.Process().memory_info().rss
for _ in range(6):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
if sys.argv[1:] == ["afterwards"]:
    memory.return_free_pages()
print(psutil.Process().memory_info().rss - before)
"""


def _grown(*arguments: str) -> int:
    ended = subprocess.run([sys.executable, "-c", _WORK, *arguments], capture_output=True, text=True, check=True)
    return int(ended.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.parametrize("when", ["at once", "afterwards"])
def test_what_threads_free_is_given_back(when: str) -> None:
    assert _grown(when) < _grown() / 2


# A step of a model: some large tensors, which are freed together.
_STEPS = """
import sys, resource
from ragkv import machine as memory
if sys.argv[1:]:
    memory.keep_free_pages()
def step():
    return [b"x" * (size << 20) for size in (8, 30, 60)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_what_is_kept_isnt_taken_anew() -> None:
    def faults(*arguments: str) -> int:
        ended = subprocess.run([sys.executable, "-c", _STEPS, *arguments], capture_output=True, text=True, check=True)
        return int(ended.stdout)

    assert faults("kept") < faults() / 10
