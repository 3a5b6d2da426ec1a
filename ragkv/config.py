"""Settings: one validated tree. Defaults < file < `RAGKV_*` environment < flags.

Nested settings are written `RAGKV_MODEL__NAME` in the environment and `[model] name = …` in the TOML file.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_EMBEDDER = "all-minilm-l6-v2"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The generator, served by vLLM."""

    name: str = Field(
        EMBEDDED_MODEL, description=f"Local folder, Hugging Face id, or the embedded model {EMBEDDED_MODEL!r}"
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="Computation and KV dtype")
    max_model_len: int | None = Field(None, ge=256, description="Context limit in tokens; default: the model's own")
    kv_cache_gib: float = Field(2.0, gt=0, description="Memory for vLLM's paged KV cache on CPU, in GiB")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Share of GPU memory that vLLM may use")
    compile: bool = Field(False, description="Let vLLM compile the model (slower start, faster decode)")


class IndexConfig(Section):
    """How documents become chunks and vectors."""

    embedder: str = Field(
        EMBEDDED_EMBEDDER, description=f"Local folder, Hugging Face id, or the embedded model {EMBEDDED_EMBEDDER!r}"
    )
    chunk_tokens: int = Field(512, ge=16, le=8192, description="Largest chunk, in the generator's tokens")
    chunk_overlap: int = Field(0, ge=0, description="Tokens that neighbouring chunks share")


class AnswerConfig(Section):
    """What a request gets when it doesn't say otherwise."""

    policy: str = Field("query", description="Which cached tokens to recompute: none, query or full")
    budget: float = Field(0.05, ge=0, le=1, description="Share of the cached tokens to recompute")
    top_k: int = Field(6, ge=1, le=100, description="Chunks to retrieve")
    max_tokens: int = Field(128, ge=1, description="Longest answer in tokens")


class ServerConfig(Section):
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8090, ge=1, le=65535, description="Port to listen on")


class Config(BaseSettings):
    """The whole tree. Functions take the section they need, not the tree."""

    model_config = SettingsConfigDict(
        env_prefix="RAGKV_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    home: Path = Field(Path("~/.ragkv"), description="Where models, documents and KV live")
    model: ModelConfig = ModelConfig()
    index: IndexConfig = IndexConfig()
    answer: AnswerConfig = AnswerConfig()
    server: ServerConfig = ServerConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = os.environ.get("RAGKV_CONFIG")
        return (init_settings, env_settings, *((TomlConfigSettingsSource(settings_cls, file),) if file else ()))
