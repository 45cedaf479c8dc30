"""The order of the packages is the way the data goes: each folder imports only from those before it, and from itself.

The order is written here, once. A name with a slash is a folder; one without is a module beside the folders.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"ltc_core": "ltc_core", "ltc_dist": "ltc_dist", "ltc_launch": "launch"}

ORDER = {
    "ltc_core": """
        errors torch_version tpu_chips settings source thread_state uninterrupted private_directory
        progress native_extension metrics_report metrics timeline/
        graph/ device/ tensor/ shapes/ record/ program/ executors/ debug/ report/ runtime/ ops/ serialization/ api/
        live/ profiler export setup top build doctor __init__
    """,
    "ltc_dist": """
        expected_name job/ collectives/ fully_sharded/ spmd/ processes/ data/ train/ checkpoint/
        multiprocessing parallel_loader data_parallel serialization libraries/ setup __init__ compat/
    """,
    "ltc_launch": """
        spec early status output user_signals temporary heartbeat lease rendezvous script forked agent shim cli
        __main__ __init__
    """,
}

# (file, what it imports inside a function) -> why that import cannot stand at the top.
INSIDE_FUNCTIONS = {
    ("ltc_core.executors.inductor.compiler.child", "ltc_core.executors.artifacts"): (
        "it imports PyTorch: only after the process has lowered its priority and watches its parent"
    ),
    ("ltc_core.executors", "ltc_core.executors.jax.executor"): "an optional dependency",
    ("ltc_core.export", "ltc_core.executors.jax.stablehlo"): "an optional dependency",
    ("ltc_dist.compat.cached_calls", "ltc_core.executors.jax.functions"): "an optional dependency",
    ("ltc_dist.libraries.dtensor", "torch.distributed.tensor.experimental"): "a second to import",
    ("ltc_dist.compat.dtensor_names", "torch.distributed.tensor._dtensor_spec"): "a second to import",
    ("ltc_dist.compat.dtensor_names", "torch.distributed.tensor.placement_types"): "a second to import",
    ("ltc_core.live.scalars", "torch.utils.tensorboard"): "an optional dependency",
    ("ltc_core.executors.jax.library", "jax"): "an optional dependency",
    ("ltc_core.executors.jax.stablehlo", "jaxlib"): "not part of jaxlib's interface",
    ("ltc_core.export", "safetensors.torch"): "only for who saves or loads an exported program",
    ("ltc_core.api.loops", "ltc_core.api.loop_bodies"): "it takes seconds, and most scripts do not need it",
    ("ltc_core.api.loops", "ltc_core.api.pure_accumulation"): "it takes seconds, and most scripts do not need it",
    ("ltc_core.api.loops", "ltc_core.api.pure_scan"): "it takes seconds, and most scripts do not need it",
    ("ltc_dist.compat.torch_xla.experimental.assume_pure", "ltc_core.api.pure_call"): "it takes seconds, and most "
    "scripts do not need it",
    ("ltc_dist.compat.torch_xla.experimental.scan", "ltc_core.api.pure_scan"): "it takes seconds, and most scripts do "
    "not need it",
    ("ltc_core.api.loops", "ltc_core.api.pure_while"): "it takes seconds, and most scripts do not need it",
    ("ltc_core.api.torch_compile", "torch._dynamo.eval_frame"): "it takes seconds, and most scripts do not need it",
    ("ltc_dist.job.host_collectives", "numpy"): "an optional dependency",
    ("ltc_launch.cli", "ltc_launch.agent"): "a mistake on the command line is told before PyTorch is imported",
    ("ltc_launch.spec", "torch"): "only for who asks for one process for each GPU",
    ("ltc_launch.spec", "ltc_core.tpu_chips"): "only for who asks for one process for each TPU chip",
}  # fmt: skip

# What is imported in the compiler's process only, where it may take seconds.
OF_THE_COMPILER = (
    "compiler.build_artifact",
    "compiler.child",
    "compiler.kernels",
    *(
        f"lowering.{name}"
        for name in ("gemm", "gemm_lowering", "index_put_lowering", "lower", "repairs")
    ),
)

# What a file may not import: what is built on it, and what is no dependency in setup.cfg.
OF_JAX = ("jax", "jaxlib", "ml_dtypes", "numpy")
FORBIDDEN = ("launch", "tests", "examples", "benchmarks", *OF_JAX)
# What is imported where LTC_EXECUTOR=jax only, with the packages of the extra `jax`.
JAX_EXECUTOR = "ltc_core.executors.jax"


class Import(NamedTuple):
    name: str
    line: int
    is_inside_function: bool
    is_for_types: bool


@functools.cache
def files() -> dict[str, Path]:
    """Each module of the packages: its dotted name and its file."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text("utf-8"))


@functools.cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(_imports(tree_of(module), module.partition(".")[0], False, False))


def _imports(tree: ast.AST, package: str, inside: bool, types: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, inside, types)
        elif isinstance(node, ast.ImportFrom):
            # Relative imports are the launcher's: its folder is installed under another name.
            within = [package] if node.level else []
            base = ".".join([*within, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in files() else base, node.lineno, inside, types)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from _imports(node, package, inside or is_function, types or for_types)


def needs(module: str, at_import: bool = False) -> set[str]:
    """The modules of the packages that a module imports, not counting its own package's `__init__`."""
    found = {
        i.name
        for i in imports(module)
        if not (at_import and (i.is_inside_function or i.is_for_types))
    }
    return found & files().keys() - {module, module.partition(".")[0]}


def reached_from(module: str) -> set[str]:
    """The modules that run when a module is imported, and itself."""
    reached: set[str] = set()
    stack = [module]
    while stack:
        name = stack.pop()
        if name not in reached:
            reached.add(name)
            stack += needs(name, at_import=True)
    return reached


def place_of(module: str) -> str:
    """The folder that a module lies in, with a slash; its own name if it stands beside the folders."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if not first:
        return "__init__"
    return f"{first}/" if (ROOT / FOLDERS[package] / first).is_dir() else first


# -- the order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ORDER)
def test_each_folder_imports_only_from_those_before_it(package: str) -> None:
    order = {place: number for number, place in enumerate(ORDER[package].split())}
    found = []
    for module in files():
        here = place_of(module)
        for other in imports(module) if module.partition(".")[0] == package else ():
            if other.name.partition(".")[0] == package:
                there = place_of(other.name)
                if there != here and order[there] > order[here]:
                    found.append(f"{files()[module]}:{other.line}: {here} imports {other.name}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", ORDER)
def test_everything_has_its_place_in_the_order(package: str) -> None:
    there = {place_of(module) for module in files() if module.partition(".")[0] == package}
    assert there == set(ORDER[package].split())


def test_a_package_imports_nothing_of_what_is_built_on_it() -> None:
    packages = list(FOLDERS)
    for module, path in files().items():
        later = packages[packages.index(module.partition(".")[0]) + 1 :]
        allowed = OF_JAX if is_of_jax(module) else ()
        for other in imports(module):
            if (module, other.name) not in INSIDE_FUNCTIONS:
                top = other.name.partition(".")[0]
                forbidden = {*later, *FORBIDDEN} - {*allowed}
                assert top not in forbidden, f"{path}:{other.line} imports {other.name}"


def is_of_jax(module: str) -> bool:
    return module.startswith(f"{JAX_EXECUTOR}.") and not module.endswith(".library")


def test_the_modules_that_need_jax_are_imported_by_each_other_only() -> None:
    own = {module for module in files() if is_of_jax(module)}
    for module in files().keys() - own:
        assert not reached_from(module) & own, module


# -- cycles ----------------------------------------------------------------------------------------


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph, [] if there is none."""
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


def test_all_modules_are_looked_at() -> None:
    assert len(files()) > 200
    assert "ltc_core.graph.ir" in needs("ltc_core.record.trace")
    assert "ltc_launch.spec" in needs("ltc_launch.cli")


def test_no_modules_import_each_other() -> None:
    """Not for types either. Whoever imports a part of a package names the part, not the package."""
    cycle = find_cycle({name: needs(name) for name in files()})
    assert not cycle, " -> ".join(cycle)


def test_the_compilers_own_modules_are_in_no_other_process() -> None:
    own = {f"ltc_core.executors.inductor.{name}" for name in OF_THE_COMPILER}
    assert own <= files().keys()
    for module in files().keys() - own:
        assert not reached_from(module) & own, module


# -- the top of the file ---------------------------------------------------------------------------


def inside_functions() -> set[tuple[str, str]]:
    return {(module, i.name) for module in files() for i in imports(module) if i.is_inside_function}


def test_imports_stand_at_the_top_of_the_file() -> None:
    assert inside_functions() == INSIDE_FUNCTIONS.keys()


def test_no_statement_stands_before_an_import() -> None:
    """A file's imports come first: what runs before one would be an order nobody sees."""
    for module in files():
        seen_other = 0
        for node in tree_of(module).body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not seen_other, f"{module}:{node.lineno} comes after line {seen_other}"
            elif not is_docstring and not is_for_types:
                seen_other = node.lineno
