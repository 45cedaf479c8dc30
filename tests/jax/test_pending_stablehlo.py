"""What is recorded, as StableHLO: it computes what the device would, and nothing runs meanwhile."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ltc_core as ltc
from ltc_core import export, metrics
from ltc_core.errors import ExportError, UnsupportedOpError
from ltc_core.executors.jax.stablehlo import Compiled

DEVICE = ltc.lazy_device()


def ready(*shape: int) -> Tensor:
    """A tensor that has its values."""
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(DEVICE)


def computed(programs: export.PendingPrograms, inputs: Sequence[Tensor]) -> list[Tensor]:
    return Compiled(programs.bytecode(), [])([t.cpu() for t in inputs])


def test_it_computes_what_the_device_does() -> None:
    x, w = ready(4, 3), ready(3, 2)
    y = F.gelu(x @ w * 2.5 + 1).softmax(-1)
    z = y.sum(0) - 0.5
    before = metrics.counter_value("ExecuteComputation")
    programs = export.pending([y, z])
    assert metrics.counter_value("ExecuteComputation") == before
    assert "stablehlo.dot_general" in programs.text()
    assert programs.hlo().startswith("HloModule") and " dot(" in programs.hlo()
    for found, expected in zip(computed(programs, [x, w]), [y, z], strict=True):
        torch.testing.assert_close(found, expected.cpu())


def test_hlo_has_the_types_of_operands() -> None:
    x, w = ready(4, 3).bfloat16(), ready(3, 2).bfloat16()
    text = export.pending([(x @ w).float().exp().sum()]).hlo()
    dot = "%dot.1 = bf16[4,2]{1,0} dot(bf16[4,3]{1,0} %"
    assert (
        dot in text and "%exponential.1 = f32[4,2]{1,0} exponential(f32[4,2]{1,0} %convert" in text
    )
    assert "-> (f32[])" in text and " parameter(0)" in text and "metadata" not in text


def test_a_product_of_int8_adds_up_in_int32() -> None:
    x = torch.arange(-60, 60, dtype=torch.int8).view(6, 20)
    found = torch._int_mm(x.to(DEVICE), x.to(DEVICE).t())
    assert " s32[6,6]{1,0} dot(s8[6,20]{1,0} %" in export.pending([found]).hlo()
    assert torch.equal(found.cpu(), x.int() @ x.int().t())


def test_a_training_step() -> None:
    x, w = ready(5, 3), ready(3, 2).requires_grad_()
    loss = F.cross_entropy(x @ w, torch.tensor([0, 1, 0, 1, 1]).to(DEVICE))
    loss.backward()
    assert w.grad is not None
    optimizer = torch.optim.SGD([w], lr=0.5)
    optimizer.step()
    text = export.pending([w, loss]).text()
    assert text.count("stablehlo.dot_general") >= 2 and "0.5" in text or "5.000000e-01" in text


def test_all_that_is_alive() -> None:
    ltc.mark_step()
    x = ready(3)
    kept = x * 3
    dropped = x.exp()
    del dropped
    also_kept = kept.sin()
    programs = export.pending()
    assert "stablehlo.exponential" not in programs.text() and "stablehlo.sine" in programs.text()
    results = computed(programs, [x])
    torch.testing.assert_close(results, [kept.cpu(), also_kept.cpu()])


def test_keys_of_draws_are_inputs() -> None:
    x = ready(8)
    text = export.pending([F.dropout(x, 0.5)]).text()
    assert "tensor<8xf32>" in text and "tensor<2xi32>" in text.partition("->")[0]


def test_an_op_of_the_host_divides_it() -> None:
    x = ready(3, 3)
    y = torch.linalg.eigvals(x * 2).real + 1
    programs = export.pending([y])
    assert programs.text().count("module @") == 2
    with pytest.raises(UnsupportedOpError, match="not computed by one program"):
        programs.bytecode()


def test_tensors_with_values_are_computed_by_nothing() -> None:
    assert export.pending([ready(2)]).text() == "" == export.pending([ready(2)]).hlo()


def test_a_dynamic_graph_is_shown_as_it_was_recorded() -> None:
    for n in (3, 4, 5, 6):
        x = ready(n, 2)
        y = (x + 1).sum()
        programs = export.pending([y])
        assert f"tensor<{n}x2xf32>" in programs.text()
        torch.testing.assert_close(computed(programs, [x])[0], y.cpu())


def test_free_sizes_are_broadcast_as_the_program_runs() -> None:
    x, y, z, other = ready(5, 4), ready(5, 1), ready(4), ready(3)
    result = (x * y + 2 * z).relu().to(torch.float64)
    free = {x: [0, 1], y: [0], z: [-1], other: [0]}
    programs = export.pending([result], free_sizes=free)
    head = programs.text().partition("->")[0]
    assert "tensor<?x?xf32>" in head and "tensor<?x1xf32>" in head and "tensor<?xf32>" in head
    compiled = Compiled(programs.bytecode(), [], True)
    for shapes in ([(5, 4), (5, 1), (4,)], [(3, 6), (1, 1), (6,)], [(1, 1), (7, 1), (2,)]):
        given = [torch.randn(shape) for shape in shapes]
        wanted = (given[0] * given[1] + 2 * given[2]).relu().double()
        torch.testing.assert_close(compiled(given), [wanted])
    with pytest.raises(ExportError, match=r"HLO is written of programs whose sizes are known"):
        programs.hlo()
    torch.testing.assert_close(result.cpu(), (x.cpu() * y.cpu() + 2 * z.cpu()).relu().double())


def test_a_free_size_that_is_broadcast_to_a_known_one() -> None:
    x, y = ready(3), ready(3)
    text = export.pending([x - y], free_sizes={x: [0]}).text()
    assert "(tensor<?xf32>, tensor<1xi32>) -> tensor<3xf32>" in text


def test_sizes_that_cannot_be_free() -> None:
    x, w = ready(4, 3), ready(3, 2)
    with pytest.raises(
        ExportError, match=r"need sizes that are to be free\n +got: aten\.\w+.* is not elementwise"
    ):
        export.pending([x @ w], free_sizes={x: [0]})
    assert (
        "dot_general" in export.pending([x @ w]).text()
    )  # and it is not noted as an op of the host
    view = ready(2, 2)[0]
    pending = x * 2
    for wrong in (pending, view, torch.ones(2)):
        with pytest.raises(ExportError, match="sizes are free of tensors that have their values"):
            export.pending([pending], free_sizes={wrong: [0]})
