"""Options that several commands share, and those that are settings, which `configured` adds to a command."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, Config
from ragkv.settings import load_config

_PANEL = "Settings"
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", dir_okay=False, help="TOML file with settings. [RAGKV_CONFIG]", rich_help_panel=_PANEL),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.", rich_help_panel=_PANEL)]
Tenant = Annotated[str, typer.Option(help="Tenant that has the documents: see `tenants` in the configuration.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Options that are settings: which setting, its type, and help. First those of many commands, then those of one.
_COMMON: dict[str, tuple[str, type, str]] = {
    "home": ("home", Path, "Folder of models, documents and KV. [RAGKV_HOME]"),
    "model": ("model.name", str, f"Local folder, Hugging Face id or {EMBEDDED_MODEL}. [RAGKV_MODEL__NAME]"),
    "embedder": (
        "index.embedder",
        str,
        f"Local folder, Hugging Face id or {EMBEDDED_EMBEDDER}. [RAGKV_INDEX__EMBEDDER]",
    ),
    "dtype": ("model.dtype", str, "bfloat16, float16 or float32. [RAGKV_MODEL__DTYPE]"),
}
SETTINGS = _COMMON | {
    "num_contexts": (
        "index.num_contexts",
        int,
        "Contexts in which each chunk is precomputed: more take longer and are more exact.",
    ),
    "learn": ("learning.on", bool, "Learn passages that recur in prompts, and reuse their KV. [RAGKV_LEARNING__ON]"),
    "policy": ("answer.policy", str, "Which cached tokens to recompute: guided (the default), none, query, full, …"),
    "budget": ("answer.budget", float, "Share of the cached tokens to recompute, 0 to 1."),
    "max_drift": ("answer.max_drift", float, "Quality target: largest estimated drift, in nats. Default: none."),
    "top_k": ("answer.top_k", int, "Chunks to retrieve."),
    "max_tokens": ("answer.max_tokens", int, "Longest answer in tokens."),
    "host": ("server.host", str, "Address to listen on. [RAGKV_SERVER__HOST]"),
    "prefill": ("front.prefill", str, "Address of the server that computes prompts. [RAGKV_FRONT__PREFILL]"),
    "decode": ("front.decode", str, "Address of the server that decodes. [RAGKV_FRONT__DECODE]"),
    "port": ("server.port", int, "Port to listen on. [RAGKV_SERVER__PORT]"),
}
MODEL = tuple(_COMMON)


def configured(command: Callable[..., None], *names: str) -> Callable[..., None]:
    """Return the command with these options and `--config`, whose settings become its argument `config`."""

    @functools.wraps(command)
    def run(config_file: Path | None, **values: Any) -> None:
        settings = {SETTINGS[name][0]: values.pop(name) for name in names}
        command(config=load(config_file, settings), **values)

    own = [each for each in inspect.signature(command).parameters.values() if each.name != "config"]
    taken = [*map(parameter, (*names, "config_file")), *(each.replace(kind=each.KEYWORD_ONLY) for each in own)]
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    return run


def parameter(name: str) -> inspect.Parameter:
    """Return the parameter from which typer makes this option; None leaves the setting to the file or its default."""
    option: Any = ConfigFile
    if name in SETTINGS:
        _, kind, text = SETTINGS[name]
        option = Annotated[kind | None, typer.Option(help=text, rich_help_panel=_PANEL if name in _COMMON else None)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


def load(config_file: Path | None, values: Mapping[str, Any]) -> Config:
    """Load the settings with these values on top, each by its setting's name, as `store.codec`."""
    sections: dict[str, Any] = {}
    for setting, value in values.items():
        section, _, name = setting.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[name] = value
    return load_config(config_file, **sections)
