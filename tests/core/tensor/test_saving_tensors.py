"""torch.save, torch.load, pickle and shared memory: lazy tensors come back where they were.

With `map_location` they come back elsewhere; `weights_only`, the default, needs no permission. A
tensor and a view of it are refused, as the torch_xla guide says.
"""

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import ltc_core as ltc
from ltc_core.errors import UnsupportedOpError
from ltc_core.settings import settings
from ltc_core.tensor.host_storage import HostStorage
from tests import prepared

ROOT = Path(__file__).parents[3]


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


def there_and_back(data: Any, is_older: bool = False, **load: Any) -> Any:
    file = io.BytesIO()
    torch.save(data, file, _use_new_zipfile_serialization=not is_older)
    file.seek(0)
    return torch.load(file, **load)


def test_save_and_load_come_back_to_the_device(device: torch.device) -> None:
    data = {
        "x": torch.arange(4.0, device=device),
        "ints": [torch.tensor([1, 2], device=device), 5],
        "part": torch.arange(6, device=device).view(2, 3)[:, 1],
        "empty": torch.zeros(0, 2, device=device),
        "half": torch.ones(2, dtype=torch.bfloat16, device=device),
        "cpu": torch.ones(1),
    }
    loaded = there_and_back(data)
    assert loaded["x"].device == loaded["ints"][0].device == device and loaded["cpu"].is_cpu
    for name in ("x", "part", "empty", "half"):
        assert ltc.is_lazy_tensor(loaded[name]) and loaded[name].equal(data[name]), name
        assert loaded[name].dtype == data[name].dtype
    assert loaded["ints"][0].tolist() == [1, 2]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("where", ["cpu", "device", "table", "lazy name"])
def test_map_location(where: str, weights_only: bool, device: torch.device) -> None:
    t = torch.arange(3.0, device=device)
    map_location: Any = {
        "cpu": "cpu",
        "device": torch.device("cpu"),
        "table": {str(device): "cpu"},
        "lazy name": device.type,
    }[where]
    loaded = there_and_back(t, map_location=map_location, weights_only=weights_only)
    expected = device if where == "lazy name" else torch.device("cpu")
    assert loaded.device == expected and loaded.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_function_as_map_location(weights_only: bool, device: torch.device) -> None:
    data = {"x": torch.arange(4.0, device=device), "cpu": torch.ones(1)}
    asked = []

    def where(storage: Any, location: str) -> Any:
        asked.append(location)
        return storage

    loaded = there_and_back(data, map_location=where, weights_only=weights_only)
    assert loaded["x"].is_cpu and loaded["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert loaded["cpu"].is_cpu and str(device) in asked
    loaded = there_and_back(data, map_location=lambda *_: None, weights_only=weights_only)
    assert loaded["x"].device == device and loaded["cpu"].is_cpu


def test_tensors_of_one_storage_share_it_on_the_device(device: torch.device) -> None:
    whole = torch.zeros(2, 3)
    loaded = there_and_back({"whole": whole, "row": whole[1]}, map_location=device)
    loaded["row"] += 1
    assert loaded["whole"].tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    "where", [None, "cpu", "ltc", {"cpu": "ltc:0", "ltc:0": "cpu"}, lambda s, place: s]
)
@pytest.mark.parametrize("kind", ["cpu", "ltc"])
def test_files_of_the_older_format(kind: str, where: Any, device: torch.device) -> None:
    """Their tensors are made before their bytes are read; files of models that were trained before 2020 have it."""
    x = torch.arange(12.0).view(3, 4).to(kind)
    data = {
        "x": x * 2,
        "turned": (x + 1).t(),
        "part": (x * 3)[1:, ::2],
        "half": x.to(torch.bfloat16),
        "ints": torch.tensor([1, 2]).to(kind),
        "empty": torch.zeros(0, 2).to(kind),
        "parameter": nn.Parameter(x + 5),
    }
    loaded = there_and_back(data, is_older=True, map_location=where)
    place = {"cpu": "ltc:0", "ltc": "cpu"}[kind] if type(where) is dict else where
    wanted = torch.device(place if isinstance(place, str) else "cpu" if callable(where) else kind)
    for name, t in data.items():
        assert loaded[name].device.type == wanted.type, name
        assert loaded[name].dtype == t.dtype and loaded[name].shape == t.shape, name
        assert torch.equal(loaded[name].cpu(), t.cpu()), name
    assert isinstance(loaded["parameter"], nn.Parameter) and loaded["parameter"].requires_grad


def test_tensors_that_share_a_storage_in_the_older_format(device: torch.device) -> None:
    x = torch.arange(12.0).view(3, 4)
    whole, row, turned = there_and_back([x, x[1], x.t()], is_older=True, map_location=device)
    whole.add_(1)
    assert row.tolist() == [5, 6, 7, 8] and turned.tolist() == (x + 1).t().tolist()


def test_a_part_of_a_storage_has_its_bytes_when_they_are_read(device: torch.device) -> None:
    """As in PyTorch's oldest files, which have views of storages."""
    file = io.BytesIO()
    torch.save(torch.arange(4.0).untyped_storage(), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    storage = HostStorage.on(device, torch.zeros(4).untyped_storage())
    t = torch.empty(0, device=device).set_(storage[8:16], 0, (2,), (1,))
    assert t.tolist() == [0, 0]
    file.seek(len(file.getvalue()) - 24)  # the number of bytes, and the bytes
    storage._set_from_file(file, None, False, 1)
    assert t.tolist() == [2, 3]


def test_a_storage_is_loaded_to_the_device(device: torch.device) -> None:
    """Pickled tensors have their storage in bytes; some libraries load it themselves, where they want it."""
    data = pickle.dumps({"x": torch.arange(3.0, device=device), "y": torch.ones(2)})
    places: list[Any] = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name != "_load_from_bytes":
                return super().find_class(module, name)

            def load(content: bytes) -> Any:
                found = torch.load(io.BytesIO(content), map_location=device)
                places.append(found._untyped_storage.device)
                return found

            return load

    loaded = Unpickler(io.BytesIO(data)).load()
    assert places == [device, device]
    assert loaded["x"].tolist() == [0, 1, 2] and loaded["y"].tolist() == [1, 1]
    assert loaded["x"].device == loaded["y"].device == device


def test_a_file_of_the_cpu_is_loaded_to_the_device(device: torch.device) -> None:
    loaded = there_and_back({"w": torch.arange(3.0)}, map_location=device)
    assert loaded["w"].device == device and loaded["w"].tolist() == [0.0, 1.0, 2.0]
    loaded["w"] += 1
    assert loaded["w"].tolist() == [1.0, 2.0, 3.0]


def test_parameters_and_modules(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    loaded = there_and_back(parameter)
    assert isinstance(loaded, nn.Parameter) and loaded.device == device
    assert not loaded.requires_grad
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(device)
    again = there_and_back(model, weights_only=False)
    x = torch.ones(4, 3, device=device)
    assert again(x).equal(model(x)) and again[0].weight.requires_grad
    state = there_and_back(model.state_dict())
    assert list(state) == list(model.state_dict())
    assert all(v.device == device for v in state.values())


def test_requires_grad_and_the_lack_of_a_graph(device: torch.device) -> None:
    leaf = torch.ones(2, device=device, requires_grad=True)
    assert there_and_back(leaf).requires_grad
    inner = there_and_back(leaf * 2)
    assert inner.tolist() == [2.0, 2.0] and inner.grad_fn is None


def test_one_tensor_twice_comes_back_as_one(device: torch.device) -> None:
    t = torch.zeros(2, device=device)
    first, second = there_and_back((t, t))
    assert first is second


def test_a_tensor_and_its_view_are_refused(device: torch.device) -> None:
    t = torch.randn(2, 2, device=device)
    t_view = t[0:2]
    with pytest.raises(RuntimeError, match="Tensor ID 2 is sharing a view with tensor ID 1") as e:
        torch.save((t, t_view), io.BytesIO())
    assert "test_saving_tensors.py" in str(e.value) and "Next:" in str(e.value)
    with pytest.raises(RuntimeError, match="Tensor ID 3 is sharing a view with tensor ID 1"):
        torch.save([t[0], torch.ones(1, device=device), t[1]], io.BytesIO())
    with pytest.raises(RuntimeError, match="Tensor ID 2 is sharing a view with tensor ID 1"):
        ltc.check_view_sharing({"a": t, "b": [t_view]})
    ltc.check_view_sharing((t, t))
    torch.save((t.cpu(), t_view.cpu()), io.BytesIO())
    torch.save(t, io.BytesIO()), torch.save(t_view, io.BytesIO())  # each alone is fine


def test_a_tied_model_can_be_saved(device: torch.device) -> None:
    """Tied weights are one parameter, not a view of one."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)).to(device)
    model[1].weight = model[0].weight
    loaded = there_and_back(model, weights_only=False)
    assert loaded[0].weight is loaded[1].weight
    state = there_and_back(model.state_dict())
    assert state["0.weight"].equal(state["1.weight"])


def test_safetensors(device: torch.device, tmp_path: Path) -> None:
    """It tells tensors that share memory by the address of their storage."""
    w = torch.arange(6.0, device=device).view(2, 3)
    st.save_file({"w": w, "b": w[0] + 1, "half": w.half()}, tmp_path / "w.safetensors")
    loaded = st.load_file(tmp_path / "w.safetensors")
    assert loaded["w"].equal(w.cpu()) and loaded["b"].tolist() == [1.0, 2.0, 3.0]
    assert loaded["half"].dtype == torch.float16
    with pytest.raises(RuntimeError, match="share memory"):
        st.save_file({"w": w, "same": w.detach()}, tmp_path / "shared.safetensors")
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)).to(device)
    model[1].weight = model[0].weight
    st.save_model(model, str(tmp_path / "tied.safetensors"))
    again = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)).to(device)
    again[1].weight = again[0].weight
    st.load_model(again, str(tmp_path / "tied.safetensors"))
    assert again[1].weight.equal(model[0].weight)


def test_pickle(device: torch.device) -> None:
    t = torch.arange(6.0, device=device).view(2, 3).t()
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        loaded = pickle.loads(pickle.dumps(t, protocol))
        assert loaded.equal(t) and loaded.device == device
    generator_state = pickle.loads(pickle.dumps(ltc.get_rng_state()))
    assert generator_state.equal(ltc.get_rng_state())


def test_to_share_memory_or_a_queue_a_cpu_copy_is_needed(device: torch.device) -> None:
    t = torch.ones(2, device=device)
    assert t.cpu().share_memory_().is_shared()


def test_a_file_is_readable_where_the_device_is_unknown(
    device: torch.device, tmp_path: Path
) -> None:
    """With map_location="cpu" no ltc_core is needed; without it torch says what is missing."""
    torch.save({"w": torch.arange(3.0, device=device)}, tmp_path / "w.pt")
    code = """
import sys, torch
w = torch.load(sys.argv[1], map_location="cpu")["w"]
assert w.is_cpu and w.tolist() == [0.0, 1.0, 2.0]
assert "ltc_core" not in sys.modules
try:
    torch.load(sys.argv[1])
except RuntimeError as error:
    print("refused:", error)
"""
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "w.pt")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("LTC_")},
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("refused:") and settings.device_name in child.stdout


def test_who_saves_tensors_of_the_device_is_told_once_how_to_load_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch, ltc_core as ltc\n"
        "model = torch.nn.Linear(2, 2).to('ltc')\n"
        "ltc.save(model.state_dict(), sys.argv[1])\n"
        "for _ in range(2):\n"
        "    torch.save(model.state_dict(), sys.argv[1])\n"
    )
    done = prepared.run(
        [sys.executable, "train.py", "w.pt"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0 and done.stderr == (
        "[ltc] torch.save writes tensors of the device ltc (train.py:5): a program without ltc_core has to load them "
        "with map_location='cpu'. ltc_core.save writes CPU tensors.\n"
    )


def test_a_library_that_saves_does_not_take_a_tensor_apart(device: torch.device) -> None:
    """huggingface_hub asks so before `save_pretrained` writes, and would save the inner tensors."""
    weight = nn.Parameter(torch.ones(2, 3, device=device))
    assert not is_traceable_wrapper_subclass(weight)
    assert not hasattr(weight, "__tensor_flatten__")
    tied = weight.view(-1).untyped_storage().data_ptr()
    assert weight.untyped_storage().data_ptr() == tied
    with pytest.raises(UnsupportedOpError, match="cannot be traced from outside"):  # PyTorch asks
        FakeTensorMode().from_tensor(weight)
