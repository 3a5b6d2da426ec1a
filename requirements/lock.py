"""Rewrite requirements/{cpu,cuda}.txt: every package, pinned, for Linux x86-64 and CPython 3.11 to 3.13.

Run `python requirements/lock.py` after a change of the dependencies in pyproject.toml. Needs `uv`. Extra arguments
go to `uv pip compile` (`--upgrade`, `--extra-index-url https://download.pytorch.org/whl/cpu`, `--find-links DIR`).
"""

import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}


def pin(line: str) -> str | None:
    """The requirement reduced to what depends on the Python version; None if this platform never needs it."""
    requirement = Requirement(line)
    marker, requirement.marker = requirement.marker, None
    wanted = [
        python
        for python in PYTHONS
        if marker is None
        or marker.evaluate({**LINUX, "python_version": python, "python_full_version": f"{python}.9", "extra": ""})
    ]
    if not wanted:
        return None
    if len(wanted) == len(PYTHONS):
        return str(requirement)
    return f"{requirement} ; " + " or ".join(f'python_version == "{python}"' for python in wanted)


for extra in ("cpu", "cuda"):
    command = ["uv", "pip", "compile", "pyproject.toml", "--universal", "--quiet"]
    command += [argument for name in (extra, "dev", "eval") for argument in ("--extra", name)]
    command += ["--python-version", PYTHONS[0], "--no-emit-index-url", "--no-annotate", "--no-header"]
    if extra == "cpu":
        command += ["--override", "requirements/overrides.txt"]
    output = HERE / f"{extra}.txt"
    subprocess.run([*command, *sys.argv[1:], "--output-file", str(output)], cwd=HERE.parent, check=True)
    pins = [pinned for line in output.read_text().splitlines() if (pinned := pin(line))]
    output.write_text("# Made by requirements/lock.py; do not edit.\n" + "\n".join(pins) + "\n")
