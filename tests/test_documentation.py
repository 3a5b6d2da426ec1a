"""The documents name files, folders, modules and headings that exist."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from ragkv.config import Config

ROOT = Path(__file__).parents[1]
FOLDERS = ("deploy", "docs", "evals", "kernels", "ragkv", "requirements", "retriever", "store", "tests")
PAGES = sorted(
    ROOT / name for name in subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).splitlines()
)
MADE_BY_USERS = ("deploy/.env", "deploy/ragkv.env")
FILE_ENDINGS = (".db", ".faiss", ".json", ".jsonl", ".lock", ".py")
HISTORY = ("CHANGELOG.md", "docs/log/")  # what they name was there when they were written

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def module_exists(name: str) -> bool:
    """Return whether `ragkv.a.b` is a module, or something that the module `ragkv.a` names."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    parents = (path.parent.with_suffix(".py"), path.parent / "__init__.py")
    return any(parent.is_file() and re.search(rf"\b{path.name}\b", parent.read_text()) for parent in parents)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    broken = []
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", [page for page in PAGES if not page_id(page).startswith(HISTORY)], ids=page_id)
def test_files_and_modules_that_are_named_exist(page):
    missing = []
    for text in _CODE.findall(prose(page)):
        if text in MADE_BY_USERS or re.fullmatch(r"ragkv\.(service|toml)", text):
            exists = True
        elif re.fullmatch(r"ragkv(\.\w+)+", text):
            exists = module_exists(text)
        elif re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*-]*", text):
            exists = any(ROOT.glob(text))
        else:
            continue
        if not exists:
            missing.append(text)
    assert not missing


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the settings, of sections too."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings(field.annotation, f"{prefix}{name}.")


@pytest.mark.parametrize("page", [page for page in PAGES if not page_id(page).startswith(HISTORY)], ids=page_id)
def test_settings_that_are_named_exist(page):
    known = set(settings(Config))
    sections = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    named = [text for text in _CODE.findall(prose(page)) if re.fullmatch(rf"({sections})\.[a-z_]+", text)]
    assert not [text for text in named if text not in known and not text.endswith(FILE_ENDINGS)]


def test_the_tree_in_the_readme_exists():
    tree = (ROOT / "README.md").read_text().partition("## Where things are")[2]
    folders = re.findall(r"^( *)((?:\w+/ *)+)", _FENCE.search(tree).group(), re.MULTILINE)
    named = [("ragkv/" if indent else "") + folder for indent, line in folders for folder in line.split()]
    assert len(named) > 10
    assert not [folder for folder in named if not (ROOT / folder).is_dir()]
    files = re.findall(r"\b\w+\.py\b", tree)
    assert "pipeline.py" in files
    assert not [file for file in files if not (ROOT / "ragkv" / file).is_file()]
