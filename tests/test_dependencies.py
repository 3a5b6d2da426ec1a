"""Dependencies point one way, and each heavy library is imported in one place only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Packages that know nothing of the layers above them, nor of each other. They may use only these of ragkv.
LOWER = {
    "kernels": {"ragkv.kernels"},
    "store": {"ragkv.store", "ragkv.errors", "ragkv.files"},
    "retriever": {"ragkv.retriever", "ragkv.errors", "ragkv.files"},
}
# Library to the files that may import it.
ONLY_IN = {
    "vllm": ("ragkv/engine/", "evals/workloads/load.py"),
    "faiss": ("retriever/index.py",),
    "triton": ("kernels/",),
    "sqlite3": ("ragkv/files.py", "ragkv/salts.py", "retriever/catalog.py"),
    "obstore": ("store/remote.py", "evals/bucket.py"),
    "lmdb": ("store/opening.py", "store/table.py", "store/usage.py"),
    "bm25s": ("retriever/keywords.py",),
    "sentence_transformers": ("retriever/encoders.py",),
    "typer": ("ragkv/cli/", "evals/cli.py"),
    "matplotlib": ("evals/",),
    "rouge_score": ("evals/scores.py",),
    "fastapi": ("ragkv/server/",),
}


def source_files():
    for folder in ("ragkv", "kernels", "store", "retriever", "evals"):
        yield from (file for file in (ROOT / folder).glob("**/*.py") if "__pycache__" not in file.parts)


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", LOWER)
def test_lower_packages_know_nothing_above_them(package):
    files = list((ROOT / package).glob("**/*.py"))
    assert files
    for file in files:
        for name in imports(file):
            known = name.split(".")[0] != "ragkv" or any(f"{name}.".startswith(f"{ok}.") for ok in LOWER[package])
            assert known, f"{file.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_heavy_libraries_stay_where_they_belong(library):
    seen = False
    for file in source_files():
        place = str(file.relative_to(ROOT))
        place = place.removeprefix("ragkv/") if place.split("/")[1] in (*LOWER, "evals") else place
        if any(name.split(".")[0] == library for name in imports(file)):
            seen = True
            assert place.startswith(ONLY_IN[library]), f"{place} imports {library}"
    assert seen or library == "triton"


def test_only_one_place_of_the_product_knows_of_evals():
    knowing = []
    for file in source_files():
        place = file.relative_to(ROOT)
        is_evals = "evals" in place.parts[:2]
        if not is_evals and any(f"{name}.".startswith("ragkv.evals.") for name in imports(file)):
            knowing.append(str(place))
    assert knowing == ["ragkv/cli/__init__.py"]


def test_code_is_not_imported_by_its_folder_name():
    bare = {"kernels", "store", "retriever", "evals"}
    for file in [*source_files(), *(ROOT / "tests").glob("**/*.py")]:
        assert not bare & {name.split(".")[0] for name in imports(file)}, file
