"""Settings: one validated tree. Defaults < file < `RAGKV_*` environment < flags.

Nested settings are written `RAGKV_MODEL__NAME` in the environment and `[model] name = …` in the TOML file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from ragkv.errors import ConfigError
from ragkv.hardware import native_dtype

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_EMBEDDER = "all-minilm-l6-v2"

OTHER_VARIABLES = {"RAGKV_CONFIG", "RAGKV_DEVICE"}  # the settings file; what `make setup` installs for
# What Kubernetes puts into the environment of every pod beside a service called ragkv.
KUBERNETES = re.compile(r"RAGKV_(SERVICE_(HOST|PORT\w*)=|PORT=\w+://|PORT_\d+_)")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The generator, served by vLLM."""

    name: str = Field(
        EMBEDDED_MODEL, description=f"Local folder, Hugging Face id, or the embedded model {EMBEDDED_MODEL!r}"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        validate_default=True,
        description="Computation and KV dtype; auto: bfloat16, or float32 on a CPU without bfloat16 instructions",
    )
    max_model_len: int | None = Field(None, ge=256, description="Context limit in tokens; default: the model's own")
    kv_cache_gib: float = Field(2.0, gt=0, description="Memory for vLLM's paged KV cache on CPU, in GiB")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Share of GPU memory that vLLM may use")
    compile: bool = Field(False, description="Let vLLM compile the model (slower start, faster decode)")

    @field_validator("dtype")
    @classmethod
    def _resolve(cls, dtype: str) -> str:
        return native_dtype() if dtype == "auto" else dtype


class IndexConfig(Section):
    """How documents become chunks and vectors."""

    embedder: str = Field(
        EMBEDDED_EMBEDDER, description=f"Local folder, Hugging Face id, or the embedded model {EMBEDDED_EMBEDDER!r}"
    )
    chunk_tokens: int = Field(512, ge=16, le=8192, description="Largest chunk, in the generator's tokens")
    chunk_overlap: int = Field(0, ge=0, description="Tokens that neighbouring chunks share")
    captures: int = Field(
        4, ge=1, le=64, description="Contexts that a chunk's KV is averaged over; 1 = once, behind the anchor"
    )


class StoreConfig(Section):
    """Where chunks' KV lies between requests."""

    codec: Literal["raw", "int8", "fp8"] = Field(
        "raw", description="How KV is stored from now on: as it is, or as 8-bit numbers with scales"
    )
    disk_gib: float | None = Field(
        None,
        gt=0,
        description="What chunks' KV may take on disk, in GiB; beyond it goes what is worth least. Default: all",
    )
    memory_gib: float = Field(
        1.0,
        ge=0,
        description="Memory for KV that is ready to use, in GiB, taken when vLLM starts; beyond it goes what is worth "
        "least. 0: none, only what the system keeps of the files",
    )
    eviction: Literal["gdsf", "lru", "lfu", "lfuda"] = Field(
        "gdsf", description="What is worth least: by uses and cost for its size, by last use, or by number of uses"
    )

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `SegmentStore`, of one that writes: plain data."""
        disk_bytes = None if self.disk_gib is None else round(self.disk_gib * (1 << 30))
        return {"codec": self.codec, "disk_bytes": disk_bytes, "eviction": self.eviction}

    def worker_options(self) -> dict[str, Any]:
        """As `options`, of one that serves requests."""
        return {**self.options(), "memory_bytes": round(self.memory_gib * (1 << 30))}


class RetrievalConfig(Section):
    """How a question finds its chunks."""

    mode: Literal["vector", "hybrid"] = Field(
        "vector", description="By what chunks are found: vectors, or vectors and words (BM25), their ranks fused"
    )
    reranker: str | None = Field(
        None, description="Cross-encoder that reorders what was found: local folder or Hugging Face id. Default: none"
    )
    candidates: int = Field(
        50, ge=1, le=1000, description="Chunks that each search brings to be fused or reordered, if top_k isn't more"
    )


class AnswerConfig(Section):
    """What a request gets when it doesn't say otherwise."""

    policy: str = Field(
        "query-spread+shift", description="Which cached tokens to recompute: none, query, full, … (docs/policies.md)"
    )
    budget: float = Field(0.05, ge=0, le=1, description="Share of the cached tokens to recompute")
    top_k: int = Field(6, ge=1, le=100, description="Chunks to retrieve")
    controller: bool = Field(True, description="Leave to vLLM what it prefills faster than it could be fused")
    max_tokens: int = Field(128, ge=1, description="Longest answer in tokens")


class ServerConfig(Section):
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8090, ge=1, le=65535, description="Port to listen on")
    keys: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(
        {},
        description="SHA-256 of each API key, by the name of who has it (`ragkv key NAME`). Default: nobody needs one",
    )


class Config(BaseSettings):
    """The whole tree. Functions take the section they need, not the tree. `Config()` reads the environment, no file."""

    model_config = SettingsConfigDict(
        env_prefix="RAGKV_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    home: Path = Field(Path("~/.ragkv"), description="Where models, documents and KV live")
    model: ModelConfig = ModelConfig()
    index: IndexConfig = IndexConfig()
    store: StoreConfig = StoreConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    answer: AnswerConfig = AnswerConfig()
    server: ServerConfig = ServerConfig()

    @field_validator("home")
    @classmethod
    def _expand(cls, home: Path) -> Path:
        return home.expanduser()


def load_config(config_file: Path | None = None, **flags: Any) -> Config:
    """Defaults, overridden by the TOML file, the environment and flags. The file is `config_file` or `RAGKV_CONFIG`.

    flags: as in the tree, `home=…, model={"name": …}`; those that are None don't count. Raises ConfigError, with a line
    for each problem, where the file can't be read, a setting is unknown or a value can't be used.
    """
    file = config_file or os.environ.get("RAGKV_CONFIG")
    sources = {
        f"in {file}": _read_toml(Path(file).expanduser()) if file else {},
        "in the environment": _read_environment(),
        "on the command line": _given(flags),
    }
    try:
        return Config(**_merge(sources.values()))
    except ValidationError as error:
        raise ConfigError("\n".join(_problem(detail, sources) for detail in error.errors())) from error


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"can't read the settings file {file}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError alike
        raise ConfigError(f"the settings file {file} is not TOML: {error}") from error


def _read_environment() -> dict[str, Any]:
    """As a tree. pydantic-settings passes over variables that it doesn't know, so they are looked for here."""
    known = {_variable(*path) for path in _setting_paths()} | OTHER_VARIABLES
    for name, value in os.environ.items():
        if name.upper().startswith("RAGKV_") and name.upper() not in known and not KUBERNETES.match(f"{name}={value}"):
            similar = difflib.get_close_matches(name.upper(), known, n=1)
            remedy = f"did you mean {similar[0]}?" if similar else f"unset it; settings are {', '.join(sorted(known))}"
            raise ConfigError(f"{name} in the environment is not a setting; {remedy}")
    try:
        return EnvSettingsSource(Config)()
    except SettingsError as error:
        raise ConfigError(f"in the environment: {error}; a whole section must be JSON") from error


def _setting_paths() -> Iterator[tuple[str, ...]]:
    for name, field in Config.model_fields.items():
        yield (name,)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from ((name, key) for key in field.annotation.model_fields)


def _variable(*path: str) -> str:
    return f"RAGKV_{'__'.join(path)}".upper()


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _given(value) if isinstance(value, Mapping) else value for key, value in flags.items() if value is not None
    }


def _merge(sources: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Later sources win, setting by setting."""
    merged: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            below = merged.get(key)
            merged[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _problem(detail: ErrorDetails, sources: Mapping[str, dict[str, Any]]) -> str:
    """One line: the setting, its value, where it was set, and what is wrong with it."""
    path = [str(part) for part in detail["loc"]]
    where = [name for name, source in sources.items() if _has(source, path)][-1:]
    if detail["type"] == "extra_forbidden":
        siblings = [known[-1] for known in _setting_paths() if list(known[:-1]) == path[:-1]]
        return " ".join([f"unknown setting {'.'.join(path)}", *where]) + f"; choose from {', '.join(siblings)}"
    return " ".join([f"{'.'.join(path)} = {detail['input']!r}", *where]) + f": {detail['msg']}"


def _has(source: Any, path: list[str]) -> bool:
    for part in path:
        if not isinstance(source, dict) or part not in source:
            return False
        source = source[part]
    return True
