"""What the compiler made is checked before it is kept: no process finds an artifact whose check has failed."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ltc_core.executors.artifacts import Artifacts
from ltc_core.executors.inductor.compiler import child
from ltc_core.executors.inductor.compiler.request import Request, encode, key
from ltc_core.executors.inductor.lowering.own_memory_lowering import AliasingError, Lowerings
from ltc_core.executors.inductor.numeric_flags import NumericFlags
from ltc_core.executors.inductor.partition import partition
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta
from ltc_core.program.subgraph import Subgraph

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's compiler uses what PyTorch deprecates
    from ltc_core.executors.inductor.compiler import build_artifact

META = TensorMeta.packed((4,), torch.float32)


@pytest.fixture
def request_(monkeypatch: pytest.MonkeyPatch) -> Request:
    """A request for neg(x); the compiler is replaced: it writes a file, and lowers nothing."""

    def compile_fx_inner(module: Any, fakes: Any, **options: Any) -> str:
        path = Path(torch._inductor.config.aot_inductor.output_path)
        path.write_bytes(b"a library")
        return str(path)

    monkeypatch.setattr(build_artifact.compile_fx, "compile_fx_inner", compile_fx_inner)
    node = Node(torch.ops.aten.neg.default, (Ref(0),), {}, 1, (META,), result=0)
    graph = Graph((node,), {0: META}, (1,))
    (subgraph,) = partition(graph, [], frozenset(), frozenset())
    assert isinstance(subgraph, Subgraph) and subgraph.compiled
    return Request(subgraph, "cpu", torch.get_num_threads(), NumericFlags.now())


def answer(request: Request, root: Path) -> tuple[tuple[Any, ...], Path | None]:
    """The answer of the compiler's process, and what a process finds in the cache after it."""
    artifacts = Artifacts(root)
    artifacts.prepare()
    name = key(request)
    found = child._answer(artifacts, build_artifact.build, name, encode(request), 1 << 30)
    return found, artifacts.find(name)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / "compiled"


def test_without_its_check_nothing_is_kept(request_: Request, root: Path) -> None:
    """The compiler lowered no output through `own`, so the check has nothing that it could approve."""
    assert answer(request_, root) == (
        ("refused", "AliasingError: the compiler did not lower the outputs", ""),
        None,
    )


def test_what_its_check_refuses_is_not_kept(
    request_: Request, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def refuse(self: Lowerings, metas: Any) -> None:
        checked.append(list(metas))
        raise AliasingError("output 0 is the memory of input x")

    monkeypatch.setattr(Lowerings, "check", refuse)
    found, path = answer(request_, root)
    assert found == ("refused", "AliasingError: output 0 is the memory of input x", "")
    assert path is None and checked == [[META]]
    assert not [p for p in root.iterdir() if p.is_dir()]  # not even half of it


def test_what_its_check_approves_is_kept(
    request_: Request, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lowerings, "check", lambda self, metas: None)
    found, path = answer(request_, root)
    assert found == ("built", str(path), 0) and path is not None
    assert Artifacts(root).facts(path) == {
        "library": "model.so",
        "returned": [1],
        "kernels": [],
    }


@pytest.mark.parametrize(
    ("num_programs", "is_there", "wanted"), [(3, False, False), (4, False, True), (0, True, True)]
)
def test_headers_are_precompiled_where_that_pays(
    num_programs: int,
    is_there: bool,
    wanted: bool,
    request_: Request,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headers = root.parent / "headers"
    headers.mkdir()
    if is_there:
        (headers / "prefix.h.gch").touch()
    for number in range(num_programs):
        (root / f"program{number}").mkdir(parents=True)
        (root / f"program{number}" / "model.so").touch()
    found = []
    compile_ = build_artifact.compile_fx.compile_fx_inner

    def noted(*args: Any, **options: Any) -> str:
        found.append(torch._inductor.config.aot_inductor.precompile_headers)
        return compile_(*args, **options)

    monkeypatch.setattr(build_artifact.codecache, "_HEADER_DIR", str(headers))
    monkeypatch.setattr(build_artifact.compile_fx, "compile_fx_inner", noted)
    answer(request_, root)
    assert found == [wanted]
