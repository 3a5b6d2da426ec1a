"""Settings as text: the reference in the documentation is the code's, and what is in force says where it is from."""

import json
import os
import runpy
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv import cli
from ragkv.config import Config, TenantConfig
from ragkv.settings import load_config, setting_fields, variable

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "settings.py"))
reference = SCRIPT["reference"]
HASH = f"{0xABC:064x}"[::-1]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAGKV_")]:
        monkeypatch.delenv(name)


def show(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli.app, ["config", *map(str, arguments)], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_the_documentation_has_the_reference_as_the_code_has_it() -> None:
    page = SCRIPT["PAGE"].read_text()
    assert page == SCRIPT["renewed"](page), "run `make docs`"
    assert reference() in page


def test_the_reference_names_every_setting_once_and_describes_it() -> None:
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in reference().splitlines()]
    assert header == ["setting", "type", "default", "environment", "meaning"]
    sections = {path[0] for path, _ in setting_fields() if len(path) > 1}
    wanted = [path for path, _ in setting_fields() if path != (path[0],) or path[0] not in sections]
    of_tenants = [row for row in rows if "NAME" in row[0]]
    rows = [row for row in rows if row not in of_tenants]
    assert [row[0] for row in rows] == [f"`{'.'.join(path)}`" for path in wanted]
    assert [row[3] for row in rows] == [f"`{variable(*path)}`" for path in wanted]
    assert all(len(row) == 5 and row[4] not in ("", "None") for row in [*rows, *of_tenants])
    assert [row[0] for row in of_tenants] == [f"`tenants.NAME.{name}`" for name in TenantConfig.model_fields]


@pytest.mark.parametrize(
    ("setting", "kind", "default"),
    [
        ("home", "path", "`~/.ragkv`"),
        ("model.dtype", "`auto`, `bfloat16`, `float16`, `float32`", "`auto`"),
        ("model.max_model_len", "integer, at least 256", "none"),
        ("model.gpu_memory_utilization", "number, above 0, at most 1", "`0.85`"),
        ("index.num_contexts", "integer, 1 to 64", "`4`"),
        ("answer.controller", "`true` or `false`", "`true`"),
        ("server.keys", "table", "none"),
    ],
)
def test_types_and_defaults(setting: str, kind: str, default: str) -> None:
    assert f"\n| `{setting}` | {kind} | {default} | " in reference()


def test_settings_in_force_are_toml_with_where_each_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ragkv.toml"
    file.write_text(f'[store]\nmemory_gib = 4\ndisk_gib = 7\n[server.keys]\n"a [b]" = "{HASH}"\n')
    monkeypatch.setenv("RAGKV_STORE__DISK_GIB", "50")
    shown = show("--config", file)
    lines = shown.splitlines()
    assert 'codec = "int8" # default' in lines
    assert "disk_gib = 50.0 # in the environment" in lines  # not the file's 7
    assert f"memory_gib = 4.0 # in {file}" in lines
    assert "# max_model_len is not set" in lines
    assert HASH not in shown and tomllib.loads(shown)["server"]["keys"] == {"a [b]": f"{HASH[:8]}…"}


def test_tenants_in_force(tmp_path: Path) -> None:
    file = tmp_path / "ragkv.toml"
    file.write_text(
        f'[tenants.acme]\nreads = ["main"]\ntokens_per_minute = 9\nkeys = {{ann = "{HASH}"}}\n[tenants.b]\n'
    )
    shown = show("--config", file)
    tenants = tomllib.loads(shown)["tenants"]
    assert tenants["acme"] == {"keys": {"ann": f"{HASH[:8]}…"}, "reads": ["main"], "tokens_per_minute": 9}
    assert tenants["b"] == {"keys": {}, "reads": []} and f'reads = ["main"] # in {file}' in shown
    assert "| `tenants.NAME.documents_mib` | number, at least 0 | none |" in reference()


def test_settings_in_force_can_be_loaded_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "ragkv.toml"
    file.write_text(show())
    assert load_config(file) == Config()


def test_a_section_in_the_environment_is_where_its_settings_are_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGKV_ANSWER", json.dumps({"top_k": 3}))
    lines = show().splitlines()
    assert "top_k = 3 # in the environment" in lines and "budget = 0.05 # default" in lines
