import logging

import pytest
import torch
from implementations import DEVICE

from ragkv.kernels import native, query_scores
from ragkv.kernels.dispatch import KernelsError, choose

CPU = torch.device("cpu")

on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter is taken only if it is asked for")
compiled = pytest.mark.skipif(native.find() is None, reason="the C++ kernels weren't compiled")


@pytest.fixture
def not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def not_compiled(monkeypatch):
    monkeypatch.setattr(native, "find", lambda: None)


@pytest.mark.parametrize("wish", ["triton", pytest.param("auto", marks=on_gpu)])
def test_triton_on_a_gpu_or_in_its_interpreter(wish):
    pytest.importorskip("triton")
    kernels = choose(wish, DEVICE)
    assert kernels.name == "triton"
    for operator in ("kv_fuse", "kv_deviation", "query_scores", "selective_attention"):
        assert getattr(kernels, operator).__module__ == f"ragkv.kernels.{operator}.triton_kernel"


@compiled
@pytest.mark.parametrize("wish", ["auto", "native"])
def test_native_on_a_cpu(wish):
    kernels = choose(wish, CPU)
    assert kernels.name == "native"
    assert kernels.query_scores is native.query_scores


@pytest.mark.parametrize("wish", ["auto", "torch"])
def test_torch_on_a_cpu_without_a_compiler(wish, not_compiled):
    kernels = choose(wish, CPU)
    assert kernels.name == "torch"
    assert kernels.query_scores is query_scores.query_scores


def test_kernels_that_are_lacking_are_complained_about(not_compiled, caplog):
    choose("auto", CPU)
    assert "several times slower" in caplog.text and "compiler" in caplog.text
    caplog.clear()
    choose("torch", CPU)
    assert not caplog.text


def test_triton_on_a_cpu(not_interpreted):
    pytest.importorskip("triton")
    with pytest.raises(KernelsError, match="Triton doesn't compile for cpu; choose auto, or torch"):
        choose("triton", CPU)


def test_native_without_a_compiler(not_compiled):
    with pytest.raises(KernelsError, match=r"`g\+\+ --version`\); choose auto, or torch"):
        choose("native", CPU)


@compiled
def test_a_library_that_cannot_be_loaded_counts_as_none(monkeypatch, caplog):
    def broken(path):
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(native.ctypes, "CDLL", broken)
    assert native.find.__wrapped__() is None
    assert "libgomp" in caplog.text


def test_native_on_a_gpu():
    with pytest.raises(KernelsError, match="for CPUs, not for cuda; choose auto, or torch"):
        choose("native", torch.device("cuda"))


def test_an_unknown_name():
    with pytest.raises(KernelsError, match="auto, triton, native, torch, not 'cuda'"):
        choose("cuda", CPU)


def test_the_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "ragkv.kernels.dispatch"):
        choose("torch", CPU)
    assert caplog.messages == ["kernels: torch on cpu"]
