"""Options that several commands share. None for a setting leaves it to the environment, the file or its default."""

from pathlib import Path
from typing import Annotated

import typer

from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL

SETTINGS = "Settings"
Home = Annotated[
    Path | None, typer.Option(help="Folder of models, documents and KV. [RAGKV_HOME]", rich_help_panel=SETTINGS)
]
Model = Annotated[
    str | None,
    typer.Option(
        help=f"Local folder, Hugging Face id or {EMBEDDED_MODEL}. [RAGKV_MODEL__NAME]", rich_help_panel=SETTINGS
    ),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        help=f"Local folder, Hugging Face id or {EMBEDDED_EMBEDDER}. [RAGKV_INDEX__EMBEDDER]", rich_help_panel=SETTINGS
    ),
]
DType = Annotated[
    str | None, typer.Option(help="bfloat16, float16 or float32. [RAGKV_MODEL__DTYPE]", rich_help_panel=SETTINGS)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", dir_okay=False, help="TOML file with settings. [RAGKV_CONFIG]", rich_help_panel=SETTINGS),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.", rich_help_panel=SETTINGS)]
Tenant = Annotated[str, typer.Option(help="Tenant that has the documents: see `tenants` in the configuration.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
