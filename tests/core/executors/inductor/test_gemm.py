"""Large matrix products go to oneDNN where it is quicker: which ones, and that they stay what they were."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ltc_core.executors.inductor.lowering import gemm
from ltc_core.executors.inductor.lowering.lower import lower
from ltc_core.executors.inductor.partition import partition
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta
from ltc_core.program.subgraph import Subgraph

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch is built without oneDNN"
)


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_is_quicker", lambda: True)


def product(*calls: tuple[torch.Tensor, ...]) -> Subgraph:
    """A part of matrix products, each (left, right) or (bias, left, right)."""
    inputs = {k: TensorMeta.like(t) for k, t in enumerate(t for call in calls for t in call)}
    nodes: list[Node] = []
    first = 0
    for k, call in enumerate(calls):
        op = aten.mm.default if len(call) == 2 else aten.addmm.default
        meta = TensorMeta.packed((call[-2].shape[0], call[-1].shape[1]), call[-1].dtype)
        refs = tuple(Ref(first + i) for i in range(len(call)))
        nodes.append(Node(op, refs, {}, len(inputs) + k, (meta,), result=0))
        first += len(call)
    outputs = tuple(node.first for node in nodes)
    [part] = partition(Graph(tuple(nodes), inputs, outputs), (), frozenset(), frozenset())
    return part


def goes_to_onednn(*operands: torch.Tensor) -> bool:
    targets = [node.target for node in lower(product(operands), "cpu").module.graph.nodes]
    return gemm.LINEAR in targets


def matrix(rows: int, columns: int, **options: Any) -> torch.Tensor:
    return torch.rand(rows, columns, **options)


def turned(rows: int, columns: int) -> torch.Tensor:
    return torch.rand(columns, rows).t()


class TestWhich:
    def test_a_large_one(self) -> None:
        assert goes_to_onednn(matrix(512, 128), matrix(128, 512))
        assert goes_to_onednn(matrix(512, 128), turned(128, 512))
        assert goes_to_onednn(torch.rand(512), matrix(512, 128), turned(128, 512))

    def test_a_small_or_narrow_one_stays_with_mkl(self) -> None:
        assert not goes_to_onednn(matrix(64, 256), turned(256, 256))
        assert not goes_to_onednn(matrix(4096, 512), matrix(512, 65))

    def test_of_transposed_ones_a_wide_one(self) -> None:
        assert goes_to_onednn(turned(128, 256), matrix(256, 1024))
        assert not goes_to_onednn(turned(1024, 256), matrix(256, 128))
        assert not goes_to_onednn(turned(512, 256), matrix(256, 512))

    def test_only_float32(self) -> None:
        assert not goes_to_onednn(
            matrix(512, 128, dtype=torch.float64), matrix(128, 512, dtype=torch.float64)
        )

    def test_only_a_bias_of_one_dim(self) -> None:
        assert not goes_to_onednn(matrix(512, 512), matrix(512, 128), matrix(128, 512))

    def test_none_where_mkl_is_as_quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gemm, "_is_quicker", lambda: False)
        assert not goes_to_onednn(matrix(512, 128), matrix(128, 512))


COMPILED = """
import sys
from pathlib import Path
import torch
from ltc_core.executors.inductor.lowering import gemm
from ltc_core.executors.inductor.compiler.build_artifact import build
from ltc_core.executors.inductor.launcher import load
from ltc_core.executors.inductor.numeric_flags import NumericFlags
from ltc_core.executors.inductor.compiler.request import Request, encode
from tests.core.executors.inductor.test_gemm import goes_to_onednn, matrix, product, turned

gemm._is_quicker = lambda: True
torch.manual_seed(0)
calls = [
    (torch.rand(384), matrix(512, 128), turned(128, 384)),
    (matrix(512, 384), matrix(384, 128)),
    (turned(64, 512), matrix(512, 640)),
]
assert all(goes_to_onednn(*call) for call in calls)
part = product(*calls)
directory = Path(sys.argv[1])
facts = build(encode(Request(part, "cpu", torch.get_num_threads(), NumericFlags.now())), directory)
library = directory / facts["library"]
assert b"aoti_torch_cpu__linear_pointwise" in library.read_bytes()
tensors = [t for call in calls for t in call]
results = load(library, list(part.graph.inputs.values())).run([tensors[i] for i in part.inputs])
for call, got in zip(calls, results, strict=True):
    # Two libraries add up to 512 products of positive numbers in different orders.
    wanted = call[-2] @ call[-1] + (call[0] if len(call) == 3 else 0)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
"""


def test_compiled_ones_are_the_products_of_operands_as_they_lie(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
