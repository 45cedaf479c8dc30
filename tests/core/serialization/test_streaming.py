"""xser.save and xser.load: what comes back, what is refused, how much is held at once."""

import json
import math
import os
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import ltc_core.serialization as xser
from ltc_core.errors import CheckpointFormatError, CheckpointIOError
from ltc_core.serialization import directory
from ltc_core.serialization.nodes import DTYPES, MAX_DEPTH

Point = namedtuple("Point", ["x", "y"])


@pytest.fixture(params=["cpu", "lazy"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    import ltc_core

    return ltc_core.lazy_device()


def there_and_back(data: Any, path: Path) -> Any:
    xser.save(data, path)
    return xser.load(path)


def test_tree_keeps_its_structure(device: torch.device, tmp_path: Path) -> None:
    data = {
        "tensors": (torch.arange(6.0, device=device).reshape(2, 3), [torch.ones(1, device=device)]),
        "point": Point(x=torch.zeros(2, device=device), y=None),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "keys": {1: "one", (2, "x"): "pair", None: 0, True and "t": b"\x00\xff", 2.5: {}},
        "numbers": [0, -1, 1 << 200, 0.1, -0.0, 1e300, math.inf, -math.inf, 1 - 2j, True, False],
        "torch": [torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.Size([])],
        "text": ["", "ä\n\u2028", "\ud800", 'quote " and \\'],
        "empty": [{}, [], (), b""],
    }
    loaded = there_and_back(data, tmp_path / "c")

    first, (second,) = loaded.pop("tensors")
    assert first.equal(torch.arange(6.0).reshape(2, 3)) and second.equal(torch.ones(1))
    assert first.device.type == second.device.type == "cpu"
    point = loaded.pop("point")
    assert type(point).__name__ == "Point" and point._fields == ("x", "y")
    assert point.x.equal(torch.zeros(2)) and point.y is None
    del data["tensors"], data["point"]
    assert repr(loaded) == repr(data)  # repr tells 1 from 1.0 and True, and -0.0 from 0.0
    assert type(loaded["ordered"]) is OrderedDict
    assert type(loaded["torch"][2]) is torch.Size


def test_numbers_of_numpy_become_pythons(tmp_path: Path) -> None:
    loaded = there_and_back([np.float32(0.5), np.int64(3), np.bool_(True)], tmp_path / "c")
    assert repr(loaded) == "[0.5, 3, True]"


def test_a_counter_comes_back(tmp_path: Path) -> None:
    loaded = there_and_back(Counter({3: 1, 5: 2}), tmp_path / "c")
    assert type(loaded) is Counter and loaded == Counter({3: 1, 5: 2})


def test_nan_comes_back(tmp_path: Path) -> None:
    loaded = there_and_back(
        [math.nan, complex(1, math.nan), torch.tensor(math.nan)], tmp_path / "c"
    )
    assert math.isnan(loaded[0]) and math.isnan(loaded[1].imag) and loaded[2].isnan()


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.int8, torch.device("cpu"), torch.Size([3])])
)
keys = st.integers() | st.text() | st.tuples(st.text(), st.booleans()) | st.none() | st.binary()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.builds(Point, inner, inner)
    ),
)


@given(tree=trees)
@hypothesis_settings(
    database=None,
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_tree_of_values_comes_back(tree: Any, tmp_path: Path) -> None:
    assert repr(there_and_back(tree, tmp_path / "c")) == repr(tree)


@pytest.mark.parametrize("name", sorted(n for n in DTYPES if not n.startswith(("q", "complex32"))))
def test_every_dtype_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype is torch.bool:
        bits %= 2
    tensor = bits.view(dtype).reshape(3, 2)
    loaded = there_and_back([tensor, tensor[0, 0], tensor[:0]], tmp_path / "c")
    assert [t.dtype for t in loaded] == [dtype] * 3
    assert [t.shape for t in loaded] == [(3, 2), (), (0, 2)]
    assert loaded[0].reshape(-1).view(torch.uint8).equal(bits)
    assert loaded[1].reshape(1).view(torch.uint8).equal(bits[: dtype.itemsize])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes_of_the_device(device: torch.device, dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([[0, 1], [2, 3]], dtype=dtype, device=device)
    loaded = there_and_back((tensor, tensor.t(), tensor[1], tensor[1, 1]), tmp_path / "c")
    expected = torch.tensor([[0, 1], [2, 3]], dtype=dtype)
    for got, want in zip(
        loaded, (expected, expected.t(), expected[1], expected[1, 1]), strict=True
    ):
        assert got.dtype == dtype and got.equal(want)


def test_views_that_are_not_plain_memory(tmp_path: Path) -> None:
    real = torch.arange(4.0)
    z = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    views = [real.expand(3, 4), real[::2], z.conj(), z.conj().imag, real.as_strided((2, 2), (1, 1))]
    for got, want in zip(there_and_back(views, tmp_path / "c"), views, strict=True):
        assert got.equal(want)


def test_shared_tensors_are_written_once_and_stay_shared(
    device: torch.device, tmp_path: Path
) -> None:
    tensor = torch.ones(3, device=device)
    loaded = there_and_back({"a": tensor, "b": [tensor], "c": torch.ones(3)}, tmp_path / "c")
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"] is not loaded["c"]
    assert sorted(os.listdir(tmp_path / "c")) == [
        "index.json",
        "t_00000.safetensors",
        "t_00001.safetensors",
    ]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_state_dict_of_tied_weights(device: torch.device, tmp_path: Path) -> None:
    model = Tied().to(device)
    loaded = there_and_back(model.state_dict(), tmp_path / "c")
    assert loaded["head.weight"] is loaded["embed.weight"]
    assert len(list((tmp_path / "c").glob("t_*"))) == len(model.state_dict()) - 1
    assert loaded._metadata == model.state_dict()._metadata  # the versions of the modules

    other = Tied()
    other.load_state_dict(loaded)
    for name, value in model.state_dict().items():
        assert other.state_dict()[name].equal(value.cpu())


def test_optimizer_state_goes_on_where_it_was(device: torch.device, tmp_path: Path) -> None:
    def trained(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3, device=device)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = fresh()
    trained(2, model, optimizer)
    xser.save((model.state_dict(), optimizer.state_dict()), tmp_path / "c")
    expected = trained(3, model, optimizer)

    model, optimizer = fresh()
    state, optimizer_state = xser.load(tmp_path / "c")
    model.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)
    assert trained(3, model, optimizer) == expected


def test_parameters_and_requires_grad_are_kept(device: torch.device, tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    frozen = nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    leaf = torch.ones(2, device=device, requires_grad=True)
    loaded = there_and_back([parameter, frozen, leaf, parameter.detach()], tmp_path / "c")
    assert [type(t) for t in loaded] == [nn.Parameter, nn.Parameter, torch.Tensor, torch.Tensor]
    assert [t.requires_grad for t in loaded] == [True, False, True, False]


def test_files_are_safetensors(device: torch.device, tmp_path: Path) -> None:
    xser.save([torch.arange(3, device=device)], tmp_path / "c")
    file = tmp_path / "c" / "t_00000.safetensors"
    (tensor,) = safetensors.torch.load(file.read_bytes()).values()
    assert tensor.equal(torch.arange(3))


def test_a_tensor_file_of_the_library_is_read(tmp_path: Path) -> None:
    tensor = torch.arange(3)
    xser.save([tensor], tmp_path / "c")
    file = tmp_path / "c" / "t_00000.safetensors"
    ours = file.read_bytes()
    safetensors.torch.save_file({"tensor": tensor}, file)
    assert file.read_bytes() == ours
    assert xser.load(tmp_path / "c")[0].equal(tensor)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    (loaded,) = there_and_back([torch.ones(1000)], tmp_path / "c")
    file = tmp_path / "c" / "t_00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert loaded.equal(torch.ones(1000))


def test_one_cpu_copy_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        assert [ref for ref in alive if ref() is not None] == []
        copied = tensor.clone()
        alive.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(directory, "cpu_copy", copy)
    xser.save([torch.full((2,), float(i)) for i in range(4)], tmp_path / "c")
    assert len(alive) == 4


def test_index_can_be_read_by_people(tmp_path: Path) -> None:
    xser.save({"w": torch.ones(2, 3, dtype=torch.complex64), "lr": 0.1}, tmp_path / "c")
    index = json.loads((tmp_path / "c" / "index.json").read_text())
    assert (index["format"], index["version"]) == ("ltc-xser", 1)
    assert index["body"]["tree"] == {"dict": {"w": {"tensor": 0}, "lr": 0.1}}
    (entry,) = index["body"]["tensors"]
    assert (entry["dtype"], entry["shape"]) == ("complex64", [2, 3])
    assert entry["stored_as"] == "real pairs"
    assert entry["nbytes"] == (tmp_path / "c" / entry["file"]).stat().st_size


class Thing:
    pass


def nested(levels: int) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = {1: tree}
    return tree


def cyclic() -> Any:
    tree: list[Any] = []
    tree.append({"again": tree})
    return tree


def ordered_with_attribute() -> Any:
    tree: Any = OrderedDict()
    tree.note = Thing()
    return tree


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: {"a": [0, Thing()]}, r"cannot save data\['a'\]\[1\]: .* for a \S*Thing"),
        (lambda: {"a": {Thing(): 1}}, r"cannot save a key of data\['a'\]"),
        (lambda: Point(1, Thing()), r"cannot save data\.y"),
        (lambda: [np.ones(2)], r"numpy\.ndarray(.|\n)*torch\.as_tensor"),
        (lambda: [defaultdict(int)], r"defaultdict(.|\n)*convert it: dict\(\.\.\.\)"),
        (lambda: [torch.ones(2).max(0)], r"convert it: tuple\(\.\.\.\)"),
        (lambda: [{1, 2}], r"builtins\.set(.|\n)*or save with ltc_core\.save, which pickles"),
        (lambda: [print], r"builtin_function"),
        (ordered_with_attribute, r"cannot save data\.note"),
        (cyclic, r"cannot save data\[0\]\['again'\]: it contains itself"),
        (lambda: nested(MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} levels"),
        (
            lambda: [torch.eye(2).to_sparse()],
            r"data\[0\]: its layout is torch.sparse_coo(.|\n)*dense",
        ),
        (lambda: [torch.ones(2, device="meta")], r"it is a meta tensor"),
        (lambda: [nn.UninitializedParameter()], r"it is a \S*UninitializedParameter"),
    ],
)
def test_what_has_no_place_is_refused_with_its_place(make: Any, text: str, tmp_path: Path) -> None:
    xser.save("old", tmp_path / "c")
    with pytest.raises(CheckpointFormatError, match=text):
        xser.save(make(), tmp_path / "c")
    assert xser.load(tmp_path / "c") == "old"
    assert os.listdir(tmp_path) == ["c"]


def test_the_deepest_tree_comes_back(tmp_path: Path) -> None:
    assert there_and_back(nested(MAX_DEPTH), tmp_path / "c") == nested(MAX_DEPTH)


def test_save_replaces_an_older_checkpoint_and_nothing_stays_behind(tmp_path: Path) -> None:
    xser.save([torch.ones(i) for i in range(5)], tmp_path / "c")
    os.chmod(tmp_path / "c", 0o750)
    assert there_and_back("new", tmp_path / "c") == "new"
    assert os.listdir(tmp_path) == ["c"] and os.listdir(tmp_path / "c") == ["index.json"]
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o750


def test_save_into_an_empty_directory_and_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "latest").symlink_to("c")
    assert there_and_back(1, tmp_path / "latest") == 1
    assert (tmp_path / "latest").is_symlink() and xser.load(tmp_path / "c") == 1


def make_file(path: Path) -> str:
    path.write_text("mine")
    return "a file"


def make_directory(path: Path) -> str:
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    return r"a directory with notes\.txt"


def make_checkpoint_with_notes(path: Path) -> str:
    xser.save(1, path)
    (path / "notes.txt").write_text("mine")
    return r"a directory with notes\.txt"


def make_foreign_index(path: Path) -> str:
    path.mkdir()
    (path / "index.json").write_text('{"format": "other"}')
    return r"no index\.json of ours"


@pytest.mark.parametrize(
    "make", [make_file, make_directory, make_checkpoint_with_notes, make_foreign_index]
)
def test_what_is_not_ours_is_not_replaced(make: Any, tmp_path: Path) -> None:
    text = make(tmp_path / "c")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointIOError, match=f"refusing to replace (.|\n)*{text}"):
        xser.save(2, tmp_path / "c")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointIOError, match="there is no checkpoint at .*/c"):
        xser.load(tmp_path / "c")


def test_works_without_numpy(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch, ltc_core.serialization as xser\n"
        "xser.save([torch.ones(3)], sys.argv[1])\n"
        "assert xser.load(sys.argv[1])[0].sum() == 3\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(xser.__file__).parents[2])}
    command = [sys.executable, "-c", script, str(tmp_path / "c")]
    subprocess.run(command, check=True, env=environment)
