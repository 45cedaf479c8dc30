"""Requests travel to another process, and their keys are equal where programs are, in every process."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ltc_core.executors.inductor.compiler import request as module
from ltc_core.executors.inductor.compiler.compiler_process import CompilerProcess
from ltc_core.executors.inductor.compiler.compiler_variables import compiler_variables, is_decisive
from ltc_core.executors.inductor.compiler.request import (
    Request,
    decode,
    encode,
    key,
)
from ltc_core.executors.inductor.lowering.lower import lower
from ltc_core.executors.inductor.numeric_flags import NumericFlags
from ltc_core.executors.inductor.partition import partition
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, Write
from ltc_core.program.lowering.retrace import Refused
from ltc_core.program.subgraph import Subgraph
from tests.core.random_graphs import random_graph
from tests.test_imports import files, reached_from

aten = torch.ops.aten
ROOT = Path(__file__).parents[4]
META = TensorMeta.packed((2, 3), torch.float32)


def make_graph(
    op: Any = aten.add.Tensor,
    meta: TensorMeta = META,
    factor: Any = 2.0,
    exponent: Any = 2,
    alpha: Any = 1,
    line: str = "a.py:1",
    first: int = 2,
    donated: frozenset[int] = frozenset(),
    more_outputs: tuple[int, ...] = (),
) -> Graph:
    """(x op y) ** exponent, then written over x times a number of the run."""
    kwargs = {"alpha": alpha}
    nodes = (
        Node(op, (Ref(0), Ref(1)), kwargs, first, (meta,), result=0, line=line),
        Node(aten.pow.Tensor_Scalar, (Ref(first), exponent), {}, first + 1, (meta,), result=0),
        Node(aten.mul_.Tensor, (Write(0, ()), Scalar(0)), {}, first + 2, (meta,), (0,), result="self"),
    )  # fmt: skip
    return Graph(nodes, {0: meta, 1: meta}, (first + 1, first + 2, *more_outputs), donated)


FLAGS = NumericFlags.now()


def make_request(
    factor: Any = 2.0,
    device: str = "cpu",
    num_threads: int = 2,
    flags: NumericFlags = FLAGS,
    **of_graph: Any,
) -> Request:
    [part] = partition(make_graph(**of_graph), [factor], frozenset(), frozenset())
    return Request(part, device, num_threads, flags)


def same(a: Subgraph, b: Subgraph) -> bool:
    """Nodes compare by identity: compare what they say, and the metas, which are interned."""
    nodes = [
        [repr((n.op, n.args, n.kwargs, n.first, n.writes, n.result)) for n in p.graph.nodes]
        for p in (a, b)
    ]
    metas = [
        [m for n in p.graph.nodes for m in n.outs] + [*p.graph.inputs.values()] for p in (a, b)
    ]
    return nodes[0] == nodes[1] and all(x is y for x, y in zip(*metas, strict=True))


def test_what_is_decoded_is_what_was_encoded() -> None:
    for seed in range(10):
        found = random_graph(seed)
        for part in partition(found.graph, found.scalars, frozenset(), frozenset()):
            request = Request(part, "cpu", 3, FLAGS)
            again = decode(encode(request))
            assert same(again.subgraph, part) and again.subgraph.scalars == part.scalars
            assert (again.device, again.num_threads, key(again)) == ("cpu", 3, key(request))


def test_a_memory_format_in_a_process_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pickle names a module in which `torch.contiguous_format` is found: there the script has it."""
    script = types.ModuleType("__mp_main__")
    script.torch = torch  # type: ignore[attr-defined]
    others = {name: module for name, module in sys.modules.items() if name != "__mp_main__"}
    monkeypatch.setattr(sys, "modules", {"__mp_main__": script, **others})
    payload = encode(make_request(alpha=torch.channels_last))
    monkeypatch.undo()
    assert b"__mp_main__" not in payload
    found = decode(payload).subgraph.graph.nodes[0].kwargs["alpha"]
    assert found is torch.channels_last


def test_what_is_decoded_can_be_lowered() -> None:
    request = decode(encode(make_request(donated=frozenset({0}))))
    assert len(lower(request.subgraph, "cpu").returned) == 1


def test_an_op_that_the_other_process_does_not_have() -> None:
    with torch.library._scoped_library("request_tests", "FRAGMENT") as library:
        library.define("gone(Tensor x, Tensor y, *, int alpha=1) -> Tensor")
        op = torch.ops.request_tests.gone.default
        payload = encode(make_request(op=op))
        assert decode(payload).subgraph.graph.nodes[0].op is op
    with pytest.raises(Refused, match="defined by the script") as refused:
        decode(payload)
    assert refused.value.op == str(op)  # so that it runs between what is compiled


OTHERS: dict[str, Callable[[], Request]] = {
    "threads": lambda: make_request(num_threads=3),
    "device": lambda: make_request(device="cuda"),
    "deterministic algorithms": lambda: make_request(flags=FLAGS._replace(deterministic=True)),
    "no oneDNN": lambda: make_request(flags=FLAGS._replace(onednn=not FLAGS.onednn)),
    "precision": lambda: make_request(flags=FLAGS._replace(precisions=("tf32",) * 9)),
    "op": lambda: make_request(op=aten.sub.Tensor),
    "size": lambda: make_request(meta=TensorMeta.packed((3, 2), torch.float32)),
    "strides": lambda: make_request(meta=TensorMeta.of((2, 3), (1, 2), 0, torch.float32)),
    "dtype": lambda: make_request(meta=TensorMeta.packed((2, 3), torch.float64)),
    "a constant": lambda: make_request(exponent=3),
    "a constant's type": lambda: make_request(exponent=2.0),
    "a named argument": lambda: make_request(alpha=2),
    "an output more": lambda: make_request(more_outputs=(2,)),
    "a donated input": lambda: make_request(donated=frozenset({0})),
    "a number that is a constant": lambda: make_request(factor=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_program_has_another_key(name: str) -> None:
    assert key(OTHERS[name]()) != key(make_request())


SAMES: dict[str, Callable[[], Request]] = {
    "made anew": make_request,
    "the line it was recorded at": lambda: make_request(line="b.py:2"),
    "another place in the recording": lambda: make_request(first=7),
    "the value of a number that is an input": lambda: make_request(factor=0.5),
}


@pytest.mark.parametrize("name", SAMES)
def test_the_same_program_has_the_same_key(name: str) -> None:
    assert key(SAMES[name]()) == key(make_request())


def test_a_key_is_a_word_of_64_digits() -> None:
    assert len(key(make_request())) == 64 and int(key(make_request()), 16)


def test_another_process_finds_the_same_key() -> None:
    """Whatever the seed of Python's hashes, which orders sets."""
    code = f"from {__name__} import *; print(key(make_request(donated=frozenset({{0, 1}}))))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {key(make_request(donated=frozenset({0, 1})))}


@pytest.mark.parametrize("what", ["processor", "_compiler", "_sources"])
def test_another_machine_compiler_or_source_has_another_key(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = key(make_request())
    monkeypatch.setattr(module, what, lambda: "another")
    monkeypatch.setattr(module, "_environment", module._environment.__wrapped__)
    assert key(make_request()) != before


def test_the_c_plus_plus_compiler_is_told_by_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = module._compiler()
    other = tmp_path / "my-g++"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o700)
    monkeypatch.setenv("CXX", f"{other} -O2")
    assert module._compiler().startswith(f"{other} ") and module._compiler() != before
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert module._compiler() == "none"


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_FREEZING", "ATEN_CPU_CAPABILITY"])
def test_variables_of_the_compiler_are_in_the_key(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(module, "_environment", module._environment.__wrapped__)
    monkeypatch.setattr(module, "compiler_variables", module.compiler_variables.__wrapped__)
    before = key(make_request())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")  # says where, not what
    assert key(make_request()) == before
    monkeypatch.setenv(name, "another")
    assert key(make_request()) != before


def test_variables_are_those_that_the_process_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that programs built later are those that the key says."""
    before = compiler_variables()
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    environment = CompilerProcess("module:build", Path("root"))._environment()
    assert {n: v for n, v in environment.items() if is_decisive(n)} == before


@pytest.mark.parametrize(
    "edited",
    [
        "graph/ir.py",
        "program/fused_optimizers.py",
        "executors/inductor/lowering/exact.py",
        "executors/inductor/lowering/gemm.py",
        "program/lowering/a_new_file.py",
    ],
)
def test_an_edit_of_what_decides_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, edited: str
) -> None:
    monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    for name in ("graph/ir.py", "executors/__init__.py", "executors/inductor/lowering/exact.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    before = module._sources()
    assert module._sources() == before
    (tmp_path / edited).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / edited).write_text("after")
    assert module._sources() != before


def test_all_that_the_compilers_process_imports_of_graphs_and_executors_is_in_the_key() -> None:
    hashed = {path for pattern in module._SOURCES for path in module._PACKAGE.glob(pattern)}
    folders = ("graph", "program", "executors")
    used = {
        files()[name]
        for name in reached_from("ltc_core.executors.inductor.compiler.build_artifact")
        if name.split(".")[1:2] and name.split(".")[1] in folders
    }
    assert used and used <= hashed
    assert all(list(module._PACKAGE.glob(pattern)) for pattern in module._SOURCES)
