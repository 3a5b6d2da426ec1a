"""The code stays readable: short files, short functions, no circle of imports."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 50


def module_name(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "ragkv" else ("ragkv", *parts)
    return ".".join(parts).removesuffix(".__init__")


def source_files():
    for folder in ("ragkv", "kernels", "store", "retriever", "evals"):
        yield from (file for file in (ROOT / folder).rglob("*.py") if "__pycache__" not in file.parts)


def trees():
    return {file: ast.parse(file.read_text()) for file in {file.resolve() for file in source_files()}}


def test_files_and_functions_fit_on_a_few_screens():
    too_long = []
    for file, tree in trees().items():
        place, num_lines = file.relative_to(ROOT), len(file.read_text().splitlines())
        too_long += [f"{place}: {num_lines} lines"] * (num_lines > MAX_FILE_LINES)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # A Triton kernel has as many parameters as the launch needs, one to a line: its body counts.
                first = node.body[0].lineno if file.name == "triton_kernel.py" else node.lineno
                num_lines = node.end_lineno - first + 1
                too_long += [f"{place}: {node.name} has {num_lines} lines"] * (num_lines > MAX_FUNCTION_LINES)
    assert not too_long, too_long


def test_imports_form_no_circle():
    names = {module_name(file): tree for file, tree in trees().items()}
    graph = {}
    for name, tree in names.items():
        imported = set()
        for node in tree.body:  # what is imported inside a function, or for types only, is no circle
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for full in (f"{node.module}.{alias.name}" for alias in node.names):
                    imported.add(full if full in names else node.module)
        graph[name] = imported & names.keys() - {name}
    assert sum(map(len, graph.values())) > 100

    done, path = set(), []

    def visit(name):
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for other in sorted(graph[name]):
                visit(other)
            path.pop()
            done.add(name)

    for name in graph:
        visit(name)
