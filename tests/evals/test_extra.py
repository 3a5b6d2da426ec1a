"""What the extra `ragkv[eval]` installs, the product does without; and a command that needs it says so in one line."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ragkv.cli import EXTRA

ONLY_THERE = ("matplotlib", "rouge_score")  # the other packages of the extra come with vLLM too
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

LOADED = """
import sys
import ragkv, ragkv.cli, ragkv.server, ragkv.pipeline
print(sorted({name.split(".")[0] for name in sys.modules} & set(%r)), "ragkv.evals" in sys.modules)
"""
WITHOUT_THE_EXTRA = """
import sys
sys.modules.update(dict.fromkeys(%r))  # None: importing it raises ModuleNotFoundError
from ragkv.cli import main
main()
"""


def run(code, *arguments):
    command = [sys.executable, "-c", code % (ONLY_THERE,), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def names(requirements):
    return {requirement.partition(">")[0].replace("-", "_") for requirement in requirements}


def test_the_hint_knows_every_package_of_the_extra():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert set(EXTRA) == names(project["optional-dependencies"]["eval"])
    assert not set(ONLY_THERE) & names(project["dependencies"])


def test_the_product_loads_nothing_of_the_extra():
    done = run(LOADED)
    assert (done.returncode, done.stdout) == (0, "[] False\n"), done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["eval", "--help"], ["eval", "swap", "--help"]])
def test_help_needs_nothing_of_the_extra(arguments):
    done = run(WITHOUT_THE_EXTRA, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: " in done.stdout and {"--help": "eval"}.get(arguments[0], "") in done.stdout


def test_a_command_that_lacks_the_extra_says_what_to_install(tmp_path):
    done = run(WITHOUT_THE_EXTRA, "eval", "report", str(tmp_path / "rows.jsonl"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: matplotlib is missing: pip install 'ragkv[eval]'\n"


def test_a_command_that_needs_nothing_of_it_runs(tmp_path):
    arguments = ["--records", "64", "--mib", "1", "--churn", "0", "--home", str(tmp_path), "--json"]
    assert run(WITHOUT_THE_EXTRA, "eval", "store", *arguments).returncode == 0
