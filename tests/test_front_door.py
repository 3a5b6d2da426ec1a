"""`import ragkv` gives the names that people need, and imports nothing heavy before they are used."""

import subprocess
import sys

import pytest

import ragkv


def test_every_public_name_is_what_its_module_has():
    from ragkv.config import Config
    from ragkv.pipeline import Pipeline
    from ragkv.policies import Policy

    assert (ragkv.Config, ragkv.Pipeline, ragkv.Policy) == (Config, Pipeline, Policy)
    assert all(getattr(ragkv, name).__module__.startswith("ragkv.") for name in ragkv.__all__)


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(AttributeError, match="no attribute 'Pipe'; it has Answer"):
        _ = ragkv.Pipe


def test_importing_it_imports_neither_torch_nor_vllm():
    code = "import sys, ragkv; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
