"""What is built on the core: files import those before them, form no cycle, and the launcher's parser no PyTorch."""

import ast
from pathlib import Path

import pytest

from tests.core.test_layers import find_cycle

ROOT = Path(__file__).parents[2]
PACKAGES = {"ltc_dist": ROOT / "ltc_dist", "ltc_launch": ROOT / "launch"}

# (file, what it imports inside a function) -> why that import cannot stand at the top.
INSIDE_FUNCTIONS = {
    ("ltc_dist.job.host_collectives", "numpy"): "it is there for who has it",
    (
        "ltc_launch.cli",
        "ltc_launch",
    ): "a mistake on the command line is told before PyTorch is there",
    ("ltc_launch.spec", "torch"): "only for who asks for one process for each GPU",
    (
        "ltc_launch.spec",
        "ltc_core.tpu_chips",
    ): "only for who asks for one process for each TPU chip",
}


def modules(package: str) -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGES[package].rglob("*.py")):
        parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
        name = ".".join([package, *(part for part in parts if part != "__init__")])
        found[name] = ast.parse(path.read_text("utf-8"))
    return found


def imported_by(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        within = (
            [package] if node.level else []
        )  # relative names are the launcher's, which has no package below it
        module = ".".join([*within, *([node.module] if node.module else [])])
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_form_no_cycle(package: str) -> None:
    files = modules(package)
    graph = {
        name: {
            i
            for n in tree.body
            for i in imported_by(n, package)
            if i in files and not f"{name}.".startswith(f"{i}.")
        }
        for name, tree in files.items()
    }
    assert any(graph.values())
    cycle = find_cycle(graph)
    assert not cycle, " -> ".join(cycle)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_stand_at_the_top(package: str) -> None:
    for name, tree in modules(package).items():
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        inside = {i for f in functions for n in ast.walk(f) for i in imported_by(n, package)[:1]}
        unknown = {(name, i) for i in inside} - INSIDE_FUNCTIONS.keys()
        assert not unknown


def test_the_launcher_stands_on_the_rest() -> None:
    for tree in modules("ltc_dist").values():
        found = [i for n in ast.walk(tree) for i in imported_by(n, "ltc_dist")]
        assert not [i for i in found if i.split(".")[0] in ("ltc_launch", "launch", "tests")]
