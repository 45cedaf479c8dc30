"""Errors of ops have torch_xla's texts; the other parts of an error are notes."""

from pathlib import Path

import pytest

from tests.compat.running import run

# A call on tensors of these sizes -> the whole text of its error.
CALLS = {
    "torch.add(x(2, 4), x(2, 2))": "Shapes are not compatible for broadcasting: f32[2,4] vs. f32[2,2]. Expected "
    "dimension "
    "1 of shape f32[2,4] (4) to match dimension 1 of shape f32[2,2] (2). Either that or that any of them is either 1 "
    "or "
    "unbounded. Try reshaping one of the tensors to match the other.",
    "torch.cat([x(2, 2), x(5, 1)])": "cat(): cannot concatenate tensors of shape f32[5,1] with f32[2,2] at dimension "
    "0. "
    "Expected shapes to be equal (except at dimension 0) or that either of them was a 1D empty tensor of size (0,).",
    "torch.div(x(2), 2, rounding_mode='bad')": "div(): invalid rounding mode `bad`. Expected it to be either 'trunc', "
    "'floor', or be left unspecified.",
    "x(2, 2, 2).flip(0, -1, 0)": "flip(): expected each dimension to appear at most once. Found dimensions: 0 (2 "
    "times). "
    "Consider changing dims from [0, -1, 0] to [0, 2].",
    "x(2, 2).flip(2)": "Value out of range (expected to be in range of [-2, 1], but got 2)",
    "torch.full([2, -2], 1.5, device='xla')": "full(): expected concrete sizes (i.e. non-symbolic) to be positive "
    "values. "
    "However found negative ones: [2, -2].",
    "torch.gather(x(2, 2), 1, x(2, 2, 2).long())": "gather(): expected rank of input (2) and index (3) tensors to be "
    "the "
    "same.",
    "torch.gather(x(2, 2), 1, x(4, 2).long())": "gather(): expected sizes of index [4, 2] to be smaller or equal "
    "those of "
    "input [2, 2] on all dimensions, except on dimension 1. However, that's not true on dimensions [0].",
    "torch.max(x(2, 0, 4), dim=-2)": "max(): Expected reduction dim 1 to have non-zero size.",
    "x(0).min(0)": "min(): Expected reduction dim 0 to have non-zero size.",
    "x(2).random_(3, 1)": "random_(): expected `from` (3) to be smaller than `to` (1).",
    "x(2).byte().random_(3, 300)": "random_(): expected `to` to be within the range [0, 255]. However got value 299, "
    "which "
    "is greater than the upper bound.",
    "x(2).uniform_(5.0, 2.0)": "uniform_(): expected `from` (5) <= `to` (2).",
    "torch.mm(x(2, 2, 2), x(2, 2))": "mm(): expected the first input tensor f32[2,2,2] to be a matrix (i.e. a 2D "
    "tensor).",
    "torch.mm(x(2, 5), x(8, 2))": "mm(): cannot matrix-multiply tensors f32[2,5] and f32[8,2]. Expected the size of "
    "dimension 1 of the first input tensor (5) to be equal the size of dimension 0 of the second input tensor (8).",
    "torch.bmm(x(3, 4), x(2, 4, 3))": "bmm(): expected `input` f32[3,4] (a 2D tensor), the 1st input tensor, to be a "
    "3D "
    "tensor.",
    "torch.bmm(x(4, 3, 4), x(2, 4, 3))": "bmm(): expected the size of the batch dimension (i.e. dimension 0) of "
    "`input` "
    "f32[4,3,4] (batch dimension size: 4), the 1st input tensor, to be the same as the size of the batch dimension of "
    "`mat2` f32[2,4,3] (batch dimension size: 2), the 2nd input tensor.",
    "torch.baddbmm(x(3, 3), x(2, 3, 8), x(2, 4, 3))": "baddbmm(): cannot apply batch matrix-multiplication to `batch1` "
    "f32[2,3,8], the 2nd input tensor, and to `batch2` f32[2,4,3], the 3rd input tensor. Expected the size of "
    "dimension 2 "
    "of `batch1` (8) to be equal the size of dimension 1 of `batch2` (4).",
    "torch.roll(x(2, 2), [])": "roll(): expected `shifts` to have at least 1 element.",
    "torch.roll(x(2, 2), [2, 2], [0])": "roll(): expected `dims` [0] (size=1) to match the size of `shifts` [2, 2] "
    "(size=2).",
    "torch.trace(x(2, 2, 2))": "trace(): expected the input tensor f32[2,2,2] to be a matrix (i.e. a 2D tensor).",
    "torch.ops.aten.clamp.default(x(2))": "clamp(): expected at least one of `min` or `max` arguments to be specified.",
    "torch.nn.functional.avg_pool3d(x(1, 1, 4, 4, 4), [2, 2])": "avg_pool3d(): expected argument kernel_size [2, 2] "
    "(size: "
    "2) to have size of 3.",
    "x(1, 1, 2, 3).expand(-1, 3)": "expand(): expected the `input` tensor f32[1,1,2,3] (rank: 4) to have a rank "
    "smaller or "
    "equal to the given `sizes` [-1, 3] (rank: 2).",
    "x(2, 3).expand(1, 3)": "expand(): expected dimension 0 of the given `sizes` [1, 3] (1) to be -1, or equal to the "
    "size "
    "of the `input` tensor f32[2,3] at dimension 0 (2).",
    "_XLAC._xla_user_computation('f', [], None)": "user_computation(f): expected at least 1 input tensor.",
}  # fmt: skip


def test_texts_are_those_of_torch_xla(tmp_path: Path) -> None:
    code = f"""
import torch, torch_xla
from torch_xla import _XLAC
x = lambda *size: torch.zeros(size, device="xla")
for call, text in {CALLS!r}.items():
    try:
        eval(call)
    except RuntimeError as error:
        assert str(error) == text, f"{{call}}: {{error}}"
    else:
        raise AssertionError(call)
"""
    run(tmp_path, code)


@pytest.mark.parametrize(
    "call", ["torch.cat([])", "torch.trace(x(2), 1)", "x(2).softmax(4)", "torch.cat([x(2), 1])"]
)
def test_other_errors_are_those_of_pytorch(tmp_path: Path, call: str) -> None:
    code = f"""
import torch, torch_xla
def fails(device):
    x = lambda *size: torch.zeros(size, device=device)
    try:
        {call}
    except Exception as error:
        return error
eager, ours = fails("cpu"), fails("xla")
assert isinstance(ours, type(eager)) and str(eager).split(".")[0] in str(ours), (eager, ours)
"""
    run(tmp_path, code)


def test_the_line_and_the_advice_are_notes(tmp_path: Path) -> None:
    code = """
import torch, torch_xla, traceback
try:
    torch.zeros(2, 2, device="xla") + torch.zeros(3, 3, device="xla")
except RuntimeError as error:
    shown = "".join(traceback.format_exception(error))
assert "recorded at script.py:4" in shown and "got: float32[2, 2] on xla:0" in shown, shown
"""
    run(tmp_path, code)
