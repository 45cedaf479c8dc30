"""Forward passes as StableHLO: eager's results, before and after a directory."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltc_core as ltc
from benchmarks.models import WORKLOADS
from ltc_core import export
from ltc_core.errors import DataFormatError, ExportError, UnsupportedOpError

WORDS = torch.arange(24).reshape(2, 12) % 7


class ManyKinds(nn.Module):
    """Arguments and results of several kinds; it writes its argument and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.offset = torch.full((3,), 0.5)

    def forward(self, x: Tensor, how: dict[str, Any], mask: Tensor | None = None) -> Any:
        self.calls.add_(1)
        x.mul_(how["scale"])
        found = x + how["bias"] + self.offset
        if mask is not None:
            found = found.masked_fill(mask, 0)
        return {"sum": found.sum(0), "count": x.shape[0], "parts": [found.bfloat16(), None]}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 2)), (torch.randn(3, 5),)),
    "gpt": lambda: (WORKLOADS["gpt"].model(), (WORDS,)),
    "resnet": lambda: (WORKLOADS["resnet"].model().eval(), (torch.randn(2, 3, 32, 32),)),
    "lstm": lambda: (nn.LSTM(4, 6, batch_first=True), (torch.randn(2, 5, 4),)),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (torch.randn(2, 5, 8),)),
    "tied": lambda: (Tied(), (WORDS,)),
    "in bfloat16": lambda: (nn.Linear(8, 4).bfloat16(), (torch.randn(3, 8).bfloat16(),)),
    "in float64": lambda: (nn.Linear(8, 4).double(), (torch.randn(3, 8).double(),)),
    "batch norm in training": lambda: (nn.BatchNorm1d(4), (torch.randn(6, 4),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_results_are_eagers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    program = export.stablehlo(model, args)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(*args)
    torch.testing.assert_close(program(*args), wanted, rtol=1e-5, atol=1e-5)
    program.save(tmp_path / "saved")
    again = export.load(tmp_path / "saved")
    torch.testing.assert_close(again(*args), wanted, rtol=1e-5, atol=1e-5)
    assert again.text() == program.text()
    for key, t in program.weights.items():
        assert torch.equal(t, before[key])
    assert len(set(program.weights)) == len(
        {id(t) for t in [*model.parameters(), *model.buffers()]}
    )


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Any:
        everything = torch.native_dropout(x, 1.0, None)  # None: as in training
        nothing = torch.native_dropout(x, 0.0, True)
        return [*everything, *nothing, *torch.native_dropout(x, 0.5, False)]


def test_dropout_without_draws() -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(export.stablehlo(Dropped(), (x,))(x), Dropped()(x))


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (1.5 - x).bfloat16() * 3, (x > 0) & torch.ones((), dtype=torch.bool)


def test_numbers_are_constants_of_the_shape_of_the_other_operand() -> None:
    x = torch.randn(2, 3)
    program = export.stablehlo(Shifted(), (x,))
    assert "constant dense<1.500000e+00> : tensor<2x3xf32>" in program.text()
    assert "constant dense<3.000000e+00> : tensor<2x3xbf16>" in program.text()
    assert "broadcast_in_dim" not in program.text()
    torch.testing.assert_close(program(x), Shifted()(x))


def test_a_model_on_the_device(tmp_path: Path) -> None:
    device = ltc.lazy_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
    x = torch.randn(3, 5)
    wanted = model(x).detach()
    program = export.stablehlo(model.to(device), (x.to(device),))
    found = program(x.to(device))
    assert found.device == device
    torch.testing.assert_close(found.cpu(), wanted)
    torch.testing.assert_close(program(x), wanted)
    # The program has the weights of its export.
    with torch.no_grad():
        model[0].weight.zero_()
    torch.testing.assert_close(program(x), wanted)


def test_arguments_and_results_of_many_kinds(tmp_path: Path) -> None:
    model = ManyKinds()
    x = torch.randn(4, 3)
    kept = x.clone()
    args = {
        "how": {"scale": 2.0, "bias": torch.ones(3)},
        "mask": torch.tensor([True, False, False]),
    }
    program = export.stablehlo(model, (x,), args)
    program.save(tmp_path)
    for one in (program, export.load(tmp_path)):
        found = one(x, **args)
        assert torch.equal(x, kept) and model.calls == 0
        wanted = ManyKinds()(x.clone(), **args)
        torch.testing.assert_close(found, wanted)
    with pytest.raises(
        ExportError, match=r"got: float32\[4, 3\], 3.0, .* expected float32\[4, 3\], 2.0"
    ):
        program(x, how={"scale": 3.0, "bias": torch.ones(3)}, mask=args["mask"])
    with pytest.raises(ExportError, match="exported for other arguments"):
        program(x, how={"scale": 2.0, "bias": torch.ones(3)})
    with pytest.raises(
        ExportError, match=r"got: float32\[2, 3\].*\n  Next: call it with arguments like"
    ):
        program(x[:2], **args)


def test_what_is_written(tmp_path: Path) -> None:
    program = export.stablehlo(nn.Linear(5, 2), (torch.randn(3, 5),))
    program.save(tmp_path / "all")
    files = {path.name for path in (tmp_path / "all").iterdir()}
    assert files == {"program.mlir", "program.bytecode", "weights.safetensors", "signature.json"}
    text = (tmp_path / "all" / "program.mlir").read_text()
    # The weights, then the inputs.
    assert re.search(
        r"@main\(%arg0: tensor<2x5xf32>, %arg1: tensor<2xf32>, %arg2: tensor<3x5xf32>\)", text
    )
    assert "stablehlo.dot_general" in text
    assert (tmp_path / "all" / "program.bytecode").read_bytes().startswith(b"ML\xefR\rStableHLO")
    about = json.loads((tmp_path / "all" / "signature.json").read_text())
    assert list(about["weights"]) == ["weight", "bias"]
    assert about["inputs"] == [{"shape": [3, 5], "dtype": "float32"}]
    program.save(tmp_path / "some", weights=False, text=False)
    assert {path.name for path in (tmp_path / "some").iterdir()} == {
        "program.bytecode",
        "signature.json",
    }


def test_a_directory_that_has_no_program(tmp_path: Path) -> None:
    with pytest.raises(
        DataFormatError, match="(?s)no exported program.*FileNotFoundError.*Next: export it again"
    ):
        export.load(tmp_path)
    export.stablehlo(nn.Linear(5, 2), (torch.randn(3, 5),)).save(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataFormatError, match="SafetensorError"):
        export.load(tmp_path)
    (tmp_path / "signature.json").write_text('{"format": 2}')
    with pytest.raises(DataFormatError, match="format 2, expected 1"):
        export.StableHLOProgram.load(tmp_path)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Keeping(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, object()


def test_what_cannot_be_exported() -> None:
    x = torch.randn(3, 5)
    with pytest.raises(UnsupportedOpError, match=r"(?s)bernoulli.*Next: call model.eval\(\)"):
        export.stablehlo(nn.Dropout(0.5), (x,))
    with pytest.raises(
        ExportError, match="(?s)cannot be traced.*DataDependent.*Next: export a part"
    ):
        export.stablehlo(Branching(), (x,))
    with pytest.raises(
        ExportError, match="(?s)got: object, expected a tensor, a number.*Next: wrap the model"
    ):
        export.stablehlo(Keeping(), (x,))


class Several(nn.Module):
    """Ops that rules of this executor have, and that few models call."""

    def forward(self, x: Tensor) -> list[Tensor]:
        distances = [torch.nn.functional.pdist(x, p) for p in (0, 1, 2, 3.5, torch.inf)]
        parts = torch.ops.aten.split_copy.Tensor(x, 2, 1)
        return [*distances, *parts, x.clone().resize_(3, 4), x.clone().resize_(2)]


def test_rare_ops() -> None:
    x = torch.randn(4, 5)
    for found, wanted in zip(export.stablehlo(Several(), (x,))(x), Several()(x), strict=True):
        torch.testing.assert_close(found, wanted)


class KernelOfALayer(nn.Module):
    """A call of the kernel that PyTorch has for a whole layer of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        at, layer = self.layer.self_attn, self.layer
        assert isinstance(at.in_proj_weight, Tensor) and isinstance(at.in_proj_bias, Tensor)
        norms = (layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias)
        wide = (layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias)
        attention = (at.in_proj_weight, at.in_proj_bias, at.out_proj.weight, at.out_proj.bias)
        kernel = torch._transformer_encoder_layer_fwd
        return kernel(x, 8, 2, *attention, False, False, 1e-5, *norms, *wide)


def test_a_layer_that_is_one_kernel() -> None:
    torch.manual_seed(0)
    model, x = KernelOfALayer().eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(export.stablehlo(model, (x,))(x), model(x))


class Pooled(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        rows = torch.arange(x.shape[0]).unsqueeze(1)
        return [x.flatten(0, 1).mean(0) + x.shape[0], x[:, 1:].sum(1) + rows + y.softmax(0)]


FREE: dict[str, tuple[nn.Module, Callable[[int], tuple[Tensor, ...]], list[dict[int, str]]]] = {
    "mlp": (MODELS["mlp"]()[0], lambda n: (torch.randn(n, 5),), [{0: "n"}]),
    "two names": (
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(1)),
        lambda n: (torch.randn(n, n + 1, 8),),
        [{0: "n", 1: "t"}],
    ),
    "two inputs": (
        Pooled(),
        lambda n: (torch.randn(n, 4, 3), torch.randn(n, 1)),
        [{0: "n"}, {0: "n"}],
    ),
}


@pytest.mark.parametrize("name", FREE)
def test_free_sizes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs, free = FREE[name]
    program = export.stablehlo(model, inputs(6), free_sizes=free)
    assert program.inputs[0].shape[0] == "n" and "tensor<?x" in program.text()
    program.save(tmp_path / "saved")
    again = export.load(tmp_path / "saved")
    for count in (1, 2, 7):
        args = inputs(count)
        with torch.no_grad():
            wanted = model(*args)
        for each in (program, again):
            torch.testing.assert_close(each(*args), wanted, rtol=1e-5, atol=1e-5)


def test_free_sizes_with_one_name_are_equal() -> None:
    program = export.stablehlo(
        Pooled(), (torch.ones(3, 4, 3), torch.ones(3, 1)), free_sizes=[{0: "n"}, {0: "n"}]
    )
    with pytest.raises(
        ExportError, match=r"got: float32\[2, 4, 3\], float32\[5, 1\], expected float32\[n, 4, 3\]"
    ):
        program(torch.ones(2, 4, 3), torch.ones(5, 1))


class BranchingOnSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x


def test_a_size_that_decides_the_way_cannot_be_free() -> None:
    with pytest.raises(
        ExportError, match=r"(?s)sizes that are to be free.*got: n > 4.*Next: leave these out"
    ):
        export.stablehlo(BranchingOnSize(), (torch.ones(6, 4),), free_sizes=[{0: "n"}])
