"""Embeddings with `sparse=True` have dense gradients in a script of torch_xla, with the numbers of eager."""

from pathlib import Path

from tests.compat.running import run


def test_embeddings_and_bags(tmp_path: Path) -> None:
    code = """
import itertools
import torch
import torch_xla.core.xla_model as xm

def gradients(device, mode, last):
    torch.manual_seed(1)
    is_sparse = device != "cpu"
    bag = torch.nn.EmbeddingBag(10, 4, sparse=is_sparse, mode=mode, include_last_offset=last).to(device)
    table = torch.nn.Embedding(10, 4, padding_idx=2, sparse=is_sparse).to(device)
    indices = torch.tensor([1, 2, 2, 4, 5, 1]).to(device)
    offsets = torch.tensor([0, 2, 2, 6] if last else [0, 2, 2, 6, 6]).to(device)
    out = bag(indices, offsets)
    weights = torch.arange(float(out.numel())).view_as(out).to(device)
    ((out.square() * weights).sum() + table(indices).square().sum()).backward()
    optimizer = torch.optim.SGD([*bag.parameters(), *table.parameters()], 0.1)
    optimizer.step()
    return [t.cpu() for t in (bag.weight.grad, table.weight.grad, bag.weight, table.weight)]

for mode, last in itertools.product(("sum", "mean"), (False, True)):
    found, expected = gradients(xm.xla_device(), mode, last), gradients("cpu", mode, last)
    torch.testing.assert_close(found, expected)
"""
    run(tmp_path, code)


def test_the_norm_of_no_gradients_is_on_the_device(tmp_path: Path) -> None:
    code = """
import torch
import torch_xla

model = torch.nn.Linear(2, 2).to("xla")
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
assert norm.device.type == "xla" and norm.item() == 0
assert torch.nn.utils.clip_grad_norm_(torch.ones(2), 1.0).device.type == "cpu"
model.weight.grad = torch.full_like(model.weight, 2.0)
assert torch.nn.utils.clip_grad.clip_grad_norm_(model.parameters(), max_norm=1.0).item() == 4
torch.testing.assert_close(model.weight.grad.cpu(), torch.full((2, 2), 0.5))
"""
    run(tmp_path, code)
