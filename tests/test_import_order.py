"""The order of the packages is the way the data goes: each folder imports only from those before it, and from itself.

The order is written here once. A name with a slash is a folder, one without is a module beside the folders.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ORDER = {
    "ltc_core": """
        errors tpu_chips settings source thread_state private_directory native_extension metrics_report metrics
        graph/ device/ tensor/ shapes/ record/ compile/ executors/ debug/ runtime/ ops/ serialization/ api/
        profiler setup build __init__
    """,
    "ltc_dist": """
        expected_name job/ collectives/ processes/ data/ train/ checkpoint/
        multiprocessing parallel_loader data_parallel serialization setup __init__ compat/
    """,
}


def room_of(package: str, module: str) -> str:
    """The folder of a module of a package, with a slash; its own name if it stands beside the folders."""
    parts = module.split(".")[1:]
    if not parts:
        return "__init__"
    return f"{parts[0]}/" if (ROOT / package / parts[0]).is_dir() else parts[0]


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imported(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each module that a module imports, at its top, in functions, and for types only."""
    known = {module for package in ("ltc_core", "ltc_dist") for module, _ in modules(package)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: an import relative to a folder"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in known else str(node.module)


@pytest.mark.parametrize("package", ORDER)
def test_each_folder_imports_only_from_those_before_it(package: str) -> None:
    order = {room: place for place, room in enumerate(ORDER[package].split())}
    found = []
    for name, path in modules(package):
        here = room_of(package, name)
        for line, other in imported(name, path):
            if other.split(".")[0] == package:
                there = room_of(package, other)
                if there != here and order[there] > order[here]:
                    found.append(
                        f"{path.relative_to(ROOT)}:{line}: {here} imports {other} of {there}"
                    )
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", ORDER)
def test_every_folder_has_a_place(package: str) -> None:
    there = {room_of(package, name) for name, _ in modules(package)}
    assert there == set(ORDER[package].split())


@pytest.mark.parametrize("package", ORDER)
def test_no_modules_import_each_other(package: str) -> None:
    edges = {
        name: {other for _, other in imported(name, path) if other.startswith(f"{package}.")}
        - {name}
        for name, path in modules(package)
    }
    while edges:
        free = [name for name, others in edges.items() if not others & edges.keys()]
        assert free, f"these import each other: {sorted(edges)}"
        for name in free:
            del edges[name]


@pytest.mark.parametrize("package", ORDER)
def test_no_file_imports_of_a_later_package(package: str) -> None:
    later = {"ltc_core": ("ltc_dist", "ltc_launch"), "ltc_dist": ("ltc_launch",)}[package]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {other}"
        for name, path in modules(package)
        for line, other in imported(name, path)
        if other.split(".")[0] in later
    ]
    assert not found, "\n".join(found)
