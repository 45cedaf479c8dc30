"""What the peer's own tests expect of small names, said again: structures that are walked, data that is sent, nms."""

from pathlib import Path

from tests.compat.running import run

IMPORTS = """
import collections, copy, pytest, torch
import torch_xla
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
import torch_xla.test.test_utils as test_utils
import torch_xla.utils.utils as xu
device = xm.xla_device()
"""

# A batch that a loader of the peer moves because it says how.
PACKED = """
rnn = torch.nn.utils.rnn

class Packed(xu.DataWrapper):
    def __init__(self, pack):
        super().__init__()
        self.pack = pack
    def get_tensors(self):
        return [self.pack.data, self.pack.sorted_indices, self.pack.unsorted_indices]
    def from_tensors(self, tensors):
        return rnn.PackedSequence(tensors[0], self.pack.batch_sizes, tensors[1], tensors[2])

rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0], [6.0, 0.0, 0.0]])
pack = rnn.pack_padded_sequence(rows, [3, 2, 1], batch_first=True)
"""


def test_structures_are_walked(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
class Pair:
    def __init__(self, first, second):
        self.first, self.second = first, second

number = lambda value: isinstance(value, int)
shared = Pair([1000, 1001], "b")
data = {{2000: (shared, 1000), "again": shared, 3000: {{1001, 4000}}}}
found, replaced = [], []
xu.for_each_instance(data, number, found.append)
assert sorted(found) == [1000, 1001, 2000, 3000, 4000]  # keys too, each once
made = xu.for_each_instance_rewrite(data, number, lambda value: replaced.append(value) or -value)
assert replaced == found and set(made) == {{-2000, "again", -3000}} and made[-3000] == {{-1001, -4000}}
assert made["again"] is made[-2000][0] and made["again"].first == [-1000, -1001] and made[-2000][1] == -1000
assert shared.first == [1000, 1001] and data[2000] == (shared, 1000)  # what was given stays what it was

circle = Pair(None, 7)
circle.first = Pair(circle, 8)
made = xu.for_each_instance_rewrite(circle, number, lambda value: -value)
assert made.first.first is made and (made.second, made.first.second) == (-7, -8) and circle.second == 7

groups = collections.defaultdict(list, a=[1])
made = xu.for_each_instance_rewrite(groups, number, lambda value: 2)
assert made == {{"a": [2]}} and made["new"] == [] and type(made) is collections.defaultdict
point = collections.namedtuple("Point", "x y")
assert xu.for_each_instance_rewrite(point(1, "y"), number, lambda value: 3) == point(3, "y")
with_module = [copy, 1, torch.Size([4])]
assert xu.for_each_instance_rewrite(with_module, number, lambda value: 0) == [copy, 0, (0,)]
{PACKED}
sizes = []
xu.for_each_instance(Packed(pack), lambda value: isinstance(value, torch.Tensor), lambda t: sizes.append(t.numel()))
assert sizes == [6]

both = torch.ones(2)
tensors = {{both: (both, [torch.zeros(1)]), "set": {{1.5, torch.ones(3)}}}}
counts = []

def upload(chosen):
    counts.append(len(chosen))
    return torch_xla._XLAC._xla_tensors_from_aten(chosen, [str(device)] * len(chosen))

made = xm.ToXlaTensorArena(upload, lambda value: type(value) is torch.Tensor).transform(tensors)
(key, inner), (_, members) = made.items()
assert counts == [3] and key is inner[0] and all(map(xm.is_xla_tensor, (key, inner[1][0])))
assert any(map(xm.is_xla_tensor, members)) and 1.5 in members
assert xm.ToXlaTensorArena(upload, lambda value: False).transform(tensors) is tensors and counts == [3]

quiet = xu.timed(lambda: 5, printfn=None)
with xu.TimedScope("a block ", printfn=None):
    assert quiet == 5
"""
    assert run(tmp_path, code) == ""


def test_data_is_sent_and_checked(tmp_path: Path) -> None:
    code = f"""{IMPORTS}{PACKED}
kept = torch.ones(2, device=device)
leaf = torch.ones(2, 2, requires_grad=True)
sent, same, (number, text) = xm.send_cpu_data_to_device([leaf, kept, (torch.ones(1), "x")], device)
assert sent.requires_grad and sent.is_leaf and same is kept and xm.is_xla_tensor(number) and text == "x"
(sent * 3).sum().backward()
assert sent.grad.tolist() == [[3, 3], [3, 3]] and leaf.grad is None
assert not number.requires_grad and xm.send_cpu_data_to_device(torch.ones(1), device)[0].device == device
with pytest.raises(RuntimeError, match="cpu"):
    xm.send_cpu_data_to_device(torch.ones(1), "cpu")

moved = xm.send_cpu_data_to_device(Packed(pack), device)
assert isinstance(moved, rnn.PackedSequence) and moved.data.device == device
(batch,) = pl.MpDeviceLoader([Packed(pack)], device)
assert isinstance(batch, rnn.PackedSequence) and batch.batch_sizes.device.type == "cpu"
assert batch.data.device == device and batch.data.tolist() == pack.data.tolist()
(inside,) = xm.send_cpu_data_to_device([{{"pack": pack}}], device)
assert inside["pack"].data.device == device

class Holder:
    def __init__(self, x, y):
        self.x, self.y = x, y

whole = torch.rand(16, device=device)
xm.check_view_sharing(Holder(whole, [whole]))
with pytest.raises(RuntimeError, match="Tensor ID 2 is sharing a view with tensor ID 1"):
    xm.check_view_sharing(Holder(whole[:10], [whole[6:]]))

assert xr.xla_device() == xr.xla_device(0) == device
assert len(torch_xla._XLAC._xla_get_all_devices()) == xr.global_device_count() == 1
assert torch_xla._XLAC._xla_get_all_devices() == ["CPU:0"]
revisions = torch_xla._XLAC._get_git_revs()
assert revisions["xla"] and revisions["torch"]

class Writer:
    rows = []
    def add_scalar(self, *row):
        self.rows.append(row)

test_utils.add_scalar_to_summary(Writer(), "Accuracy/test", 98.5, 7)
test_utils.add_scalar_to_summary(None, "Accuracy/test", 98.5, 7)
assert Writer.rows == [("Accuracy/test", 98.5, 7)]
"""
    run(tmp_path, code)


def test_nms(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
corners = [[0, 0, 4, 4], [1, 1, 5, 5], [10, 10, 12, 12], [12, 12, 10, 10], [20, 20, 21, 21.0]]
boxes = torch.tensor(corners, device=device)
scores = torch.tensor([0.6, 0.9, 0.3, 0.2, 0.05], device=device)
score, overlap = torch.tensor(0.1, device=device), torch.tensor(0.35, device=device)
chosen, count = xf.nms(boxes, scores, score, overlap, 5)
assert chosen.device == device and chosen.dtype == torch.int32
# 0 shares 9 of 23 with 1; 3 is 2 with its corners changed; the score of 4 is too low
assert chosen.tolist() == [1, 2, 0, 3, 4] and count.item() == 2
assert xf.nms(boxes, scores, score, 0.5, 5)[1].item() == 3
chosen, count = xf.nms(boxes, scores, 0.0, 0.5, 2)
assert chosen.tolist() == [1, 0] and count.item() == 2
chosen, count = xf.nms(boxes[:0], scores[:0], 0.0, 0.5, 0)
assert chosen.tolist() == [] and count.item() == 0
"""
    run(tmp_path, code)


def test_class_labels_may_be_floats(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
F = torch.nn.functional
for shape, labels in ((5, 4), torch.tensor([0, 3, 1, 2, 2])), ((2, 4, 3, 3), torch.arange(18).reshape(2, 3, 3) % 4):
    x = torch.randn(shape, requires_grad=True)
    y = x.detach().to(device).requires_grad_()
    wanted = F.cross_entropy(x, labels)
    found = F.cross_entropy(y, labels.float().to(device))
    wanted.backward()
    found.backward()
    torch.testing.assert_close([found.cpu(), y.grad.cpu()], [wanted.detach(), x.grad], check_stride=False)
"""
    run(tmp_path, code)


def test_elements_are_repeated_to_a_length(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
import torch_xla.debug.metrics as met
from torch_xla.experimental.custom_kernel import repeat_with_fixed_output_size as repeat
x, repeats = torch.randn(6), torch.tensor([0, 2, 1, 0, 3, 0])
plain = torch.repeat_interleave(x, repeats)
results = [repeat(x.to(device), repeats.to(device), n) for n in (4, 6, 8)]
assert not met.executed_fallback_ops() and met.counter_value("ExecuteComputation") is None
extended = [*plain.tolist(), x[5].item(), x[5].item()]
assert [r.tolist() for r in results] == [plain[:4].tolist(), plain.tolist(), extended]
"""
    run(tmp_path, code)


def test_the_backend_and_memory(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
import torch_xla.debug.metrics as met
c = torch_xla._XLAC
c._init_xla_lazy_backend()
c._init_xla_lazy_backend()
assert met.counter_value("RegisterXLAFunctions") == 1
x, y = torch.ones(4, device=device), torch.ones(4, device=device) * 2
assert 0 < c._unsafe_buffer_pointer(x) != c._unsafe_buffer_pointer(y) > 0
assert c._unsafe_buffer_pointer(x[2:]) == c._unsafe_buffer_pointer(x) and y.tolist() == [2] * 4
with pytest.raises(RuntimeError, match="not on the device"):
    c._unsafe_buffer_pointer(torch.ones(2))

import torch_xla.experimental.assume_pure as ap
import torch_xla.experimental.scan_layers as layers_module
ap._XLA_COMPUTATION_CACHE.clear()
layers_module._ONE_LAYER_CACHE.clear()
layer = torch.nn.Linear(4, 4).to(device)
assert torch.equal(layers_module.scan_layers([layer, layer], x), layer(layer(x)))
"""
    run(tmp_path, code)


def test_old_names_of_functions_warn_once(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
import logging, sys
from torch_xla.experimental import deprecation
records = []
logging.getLogger().addFilter(lambda record: records.append(record.getMessage()))

def new(x, y=1):
    return x + y

@deprecation.mark_deprecated(new, extra_msg="It is gone in 3.0.")
def old(x):
    return None

assert (old(2), old(2, y=3)) == (3, 5)
assert records == ["__main__.old is deprecated. Use __main__.new instead. It is gone in 3.0."]
here = sys.modules["__main__"]
assert deprecation.deprecated(here, new, "older")(1) == 2 and records[1].startswith("__main__.older is deprecated.")
plain = new
deprecation.register_deprecated(here, new)
assert new is not plain and new(1) == 2 and records[2] == "__main__.new is deprecated. Use __main__.new instead."
"""
    run(tmp_path, code)


def test_functions_of_structures_over_flat_tensors(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
import torch_xla.core.xla_builder as xb

def pick(nested, others, scale=1):
    return {{"sum": (nested["a"]["b"] + others[1]) * scale, "rest": [others[0]]}}

flat = xb.FlattenedInputFunc(pick)
a, b = torch.ones(2), torch.ones(2) * 3
tensors = flat.preprocess(({{"a": {{"b": a}}}}, [7, b]), {{"scale": 2}})
assert [t.tolist() for t in tensors] == [[1, 1], [3, 3]] and 7 in flat.non_tensors
made = flat.postprocess(flat.flat_call([t * 10 for t in tensors]))
assert made["sum"].tolist() == [80, 80] and made["rest"] == [7]
assert flat.postprocess(flat.flat_call(flat.preprocess(({{"a": {{"b": 5, "c": 7}}}}, [0, 6]))))["sum"] == 11
with pytest.raises(AssertionError, match="preprocess must be called first"):
    xb.FlattenedInputFunc(pick).flat_call([])

calls = []

def wave(x, pair, negate=False):
    calls.append(negate)
    sine = xb.Op.sin(x) + pair[0]
    return {{"sine": -sine if negate else sine, "second": pair[1]}}

call = xb.XlaCallable(wave)
x, y, z = (torch.randn(2, 2, device=device) for _ in range(3))
for negate in (False, True, False):
    found = call(x, (y, z), negate=negate)
    wanted = torch.sin(x.cpu()) + y.cpu()
    torch.testing.assert_close(found["sine"].cpu(), -wanted if negate else wanted)
    assert torch.equal(found["second"], z)
assert calls == [False, True]
assert call(x[0], (y[0], z[0]))["sine"].shape == (2,) and calls == [False, True, False]
"""
    run(tmp_path, code)
