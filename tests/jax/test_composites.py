"""Marks of composites: one `stablehlo.composite` where a program is shown or exported, nothing where it runs."""

import pytest
import torch
from torch import Tensor, nn

import ltc_core as ltc
from ltc_core import export
from ltc_core.errors import ExportError
from ltc_core.graph.composite import MARK, Boundary

DEVICE = ltc.lazy_device()


def begin(t: Tensor, pos: int, name: str = "my.add") -> Tensor:
    return MARK(t, Boundary(name, pos, name, True).text)  # type: ignore[no-any-return]


def end(t: Tensor, pos: int, name: str = "my.add", attr: dict[str, object] | None = None) -> Tensor:
    return MARK(t, Boundary(name, pos, name, False, attr).text)  # type: ignore[no-any-return]


class Marked(nn.Module):
    """A composite with two inputs, two results, a weight, and another composite within it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y, x = begin(y, 1), begin(x, 0)
        inner = end(begin(x * self.weight, 0, "my.inner").exp(), 0, "my.inner")
        total = (inner + y).softmax(-1)
        difference = x - y
        total = end(total, 0, attr={"k": 2, "scale": 0.5, "of": [True, False], "kind": "sum"})
        return total * end(difference, 1)


def test_an_exported_program() -> None:
    model, x, y = Marked(), torch.randn(2, 3), torch.randn(2, 3)
    program = export.stablehlo(model, (x, y))
    text = program.text()
    assert text.count('stablehlo.composite "my.add"') == 1
    assert text.count('stablehlo.composite "my.inner"') == 1
    attributes = '{k = 2 : i64, kind = "sum", of = dense<[true, false]> : tensor<2xi1>, scale = 5.000000e-01 : f32}'
    assert f"composite_attributes = {attributes}, decomposition = @my.add.impl" in text
    main = text[text.index("@main") : text.index("func.func private")]
    assert "stablehlo.exponential" not in main and "stablehlo.multiply" in main
    assert "custom_call" not in text
    torch.testing.assert_close(program(x, y), model(x, y))


def test_a_free_size() -> None:
    model, x, y = Marked(), torch.randn(4, 3), torch.randn(4, 3)
    program = export.stablehlo(model, (x, y), free_sizes=[{0: "n"}, {0: "n"}])
    assert program.text().count('stablehlo.composite "my.add"') == 1
    for count in (2, 5):
        x, y = torch.randn(count, 3), torch.randn(count, 3)
        torch.testing.assert_close(program(x, y), model(x, y))


def test_what_is_recorded() -> None:
    model = Marked().to(DEVICE)
    x = torch.randn(2, 3).to(DEVICE).requires_grad_()
    y = torch.randn(2, 3).to(DEVICE)
    found = model(x, y)
    programs = export.pending([found])
    assert programs.text().count("stablehlo.composite") == 2
    assert programs.bytecode().startswith(b"ML")
    found.sum().backward()
    assert x.grad is not None
    eager, on_cpu = Marked(), x.detach().cpu().requires_grad_()
    wanted = eager(on_cpu, y.cpu())
    wanted.sum().backward()
    torch.testing.assert_close(found.cpu(), wanted)
    torch.testing.assert_close(x.grad.cpu(), on_cpu.grad)


def test_equal_names_get_numbers() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for key in "ab":
                x = MARK(x, Boundary("my.step", 0, key, True).text) + 1
                x = MARK(x, Boundary("my.step", 0, key, False).text)
            return x

    text = export.stablehlo(Twice(), (torch.ones(2),)).text()
    assert "decomposition = @my.step.impl}" in text and "decomposition = @my.step.impl_0}" in text


def test_marks_without_results_are_dropped() -> None:
    class Open(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return begin(x, 0) + 1

    text = export.stablehlo(Open(), (torch.ones(2),)).text()
    assert "composite" not in text and "custom_call" not in text


class Circle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = end(begin(x, 0) + 1, 0)
        return end(begin(y.exp(), 1) * y, 1)


class Gap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return end(begin(x, 1) + 1, 0)


@pytest.mark.parametrize(
    ("model", "got"), [(Circle(), "an input depends on a result"), (Gap(), r"inputs \[1\]")]
)
def test_marks_that_make_no_composite(model: nn.Module, got: str) -> None:
    with pytest.raises(ExportError, match=f"'my.add' cannot be made of its marks\n  got: {got}"):
        export.stablehlo(model, (torch.ones(2),))
