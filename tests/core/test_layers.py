"""The file list of ltc_core is a layer order: imports stand at the top of a file and form no cycle."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import ltc_core

PACKAGE = Path(ltc_core.__file__).parent
NAME = PACKAGE.name

# (file, what it imports inside a function) -> why that import cannot stand at the top.
INSIDE_FUNCTIONS: dict[tuple[str, str], str] = {
    ("ltc_core.executors.inductor.child", "ltc_core.executors.inductor.artifacts"): (
        "it imports PyTorch: only after the process has lowered its priority and watches its parent"
    ),
}

# What is imported in the compiler's process only, where it may take seconds.
OF_THE_COMPILER = ("build_artifact", "child", "gemm", "gemm_lowering", "lower")

# What a file may import beside ltc_core, Python's own library and torch: the dependencies of setup.cfg.
MAY_NOT_BE_IMPORTED = (
    "ltc_dist",
    "ltc_launch",
    "launch",
    "tests",
    "examples",
    "benchmarks",
    "numpy",
)


@functools.cache
def modules() -> dict[str, Path]:
    """Each module of the package: its dotted name and its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [NAME, *path.relative_to(PACKAGE).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


@functools.cache
def files() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text("utf-8")) for name, path in modules().items()}


def is_for_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported_by(node: ast.AST) -> list[str]:
    """Dotted names an import statement brings in; `from a import b` is a.b where that is a file."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports name the whole path"
        module = node.module or ""
        inner = [f"{module}.{alias.name}" for alias in node.names]
        return [name if name in modules() else module for name in inner]
    return []


def imports(tree: ast.AST, inside_function: bool = False) -> Iterator[tuple[str, bool, int]]:
    """Yield (name, is inside a function, line) for every import that is ever run."""
    for child in ast.iter_child_nodes(tree):
        if is_for_typing_only(child):
            continue
        for name in imported_by(child):
            yield name, inside_function, child.lineno  # type: ignore[attr-defined]
        deeper = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(child, inside_function or deeper)


def needs(module: str) -> set[str]:
    """The modules of the package that must have run before this one can."""
    found = {name for name, inside, _ in imports(files()[module]) if not inside}
    return {name for name in found if name in files() and name != module}


def reached_from(module: str) -> set[str]:
    """The modules of the package that it needs, by whatever way, and itself."""
    reached: set[str] = set()
    stack = [module]
    while stack:
        name = stack.pop()
        if name not in reached:
            reached.add(name)
            stack += needs(name) - {NAME}
    return reached


# -- the order -------------------------------------------------------------------------------------


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Give one cycle of a graph, [] if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if cycle := visit(other, [*path, name]):
                return cycle
        done.add(name)
        return []

    for name in sorted(graph):
        if cycle := visit(name, []):
            return cycle
    return []


def test_a_cycle_is_found_where_there_is_one() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert find_cycle(graph) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_whole_package_is_looked_at() -> None:
    assert len(files()) > 40
    assert f"{NAME}.graph" in needs(f"{NAME}.trace")
    assert f"{NAME}.settings" in needs(f"{NAME}.metrics")


def test_imports_form_no_cycle() -> None:
    """The package's own __init__ stands above all: whoever imports a part of it names the part."""
    graph = {name: needs(name) - {NAME} for name in files()}
    cycle = find_cycle(graph)
    assert not cycle, " -> ".join(cycle)


@pytest.mark.parametrize(
    "package", ["executors", "executors.inductor", "device", "debug", "serialization"]
)
def test_a_subpackages_init_stands_above_its_files(package: str) -> None:
    """Else importing one file of it would need the file that is just being imported."""
    init = f"{NAME}.{package}"
    inner = [name for name in files() if name.startswith(f"{init}.")]
    assert inner
    for name in inner:
        assert init not in {imported for imported, _, _ in imports(files()[name])}, name


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("settings", "metrics"), ("errors", "settings"), ("graph", "passes"), ("views", "graph"),
        ("buffer", "trace"), ("cell", "trace"), ("trace", "tensor"), ("tensor", "runtime"),
        ("executors", "runtime"), ("compiler", "runtime"), ("runtime", "dispatch"), ("dispatch", "lazy_model"),
        ("executors.reference", "executors.chain"), ("executors.chain", "executors.inductor.chain"),
        ("executors.stages", "executors.part"), ("executors.part", "executors.replay"),
        ("executors.part", "executors.inductor.partition"), ("executors.part", "executors.inductor.request"),
        ("executors.inductor.chain", "executors.inductor.tiers"),
        ("executors.inductor.service", "executors.inductor.tiers"),
        ("executors.inductor.compiler_process", "executors.inductor.service"),
        ("executors.inductor.executor", "runtime"),
    ],
)  # fmt: skip
def test_known_layers_are_in_order(lower: str, higher: str) -> None:
    """What stands below never needs, by whatever way, what stands above."""
    assert f"{NAME}.{higher}" in files()
    assert f"{NAME}.{higher}" not in reached_from(f"{NAME}.{lower}")


def test_the_compilers_own_modules_are_in_no_other_process() -> None:
    inductor = f"{NAME}.executors.inductor"
    own = {f"{inductor}.{name}" for name in OF_THE_COMPILER}
    assert own <= files().keys()
    for module in files().keys() - own:
        assert not reached_from(module) & own, module


def test_the_core_knows_nothing_of_what_is_built_on_it() -> None:
    for module, tree in files().items():
        for name, _, line in imports(tree):
            top = name.partition(".")[0]
            assert top not in MAY_NOT_BE_IMPORTED, f"{module}:{line} imports {name}"


# -- the top of the file ---------------------------------------------------------------------------


def inside_functions() -> set[tuple[str, str]]:
    return {
        (module, name)
        for module, tree in files().items()
        for name, inside, _ in imports(tree)
        if inside
    }


def test_imports_stand_at_the_top_of_the_file() -> None:
    found = sorted(inside_functions() - INSIDE_FUNCTIONS.keys())
    assert not found, f"imported inside a function: {found}"


def test_the_list_of_exceptions_is_not_longer_than_it_must_be() -> None:
    assert INSIDE_FUNCTIONS.keys() <= inside_functions()
    assert all(len(reason) > 20 for reason in INSIDE_FUNCTIONS.values())


def test_no_statement_stands_before_an_import() -> None:
    """A file's imports come first: what runs before one would be an order nobody sees."""
    for module, tree in files().items():
        seen_other = 0
        for node in tree.body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not seen_other, f"{module}:{node.lineno} comes after line {seen_other}"
            elif not is_docstring and not is_for_typing_only(node):
                seen_other = node.lineno
