"""`torch_xla.experimental.unbounded_dynamism_export`: each pass leaves a graph with the same results."""

from pathlib import Path

from tests.compat.running import run

CODE = """
import warnings
import torch
warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own code
from torch_xla.experimental.unbounded_dynamism_export import *
from torch.export import Dim, export

aten = torch.ops.aten
F = torch.nn.functional

class Model(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *args):
        return self.call(*args)

def code(ep):
    ep.graph_module.recompile()
    return ep.graph_module.code

def check(call, args, free, change, gone=None, new=None, then=()):
    ep = export(Model(call), args, dynamic_shapes=(free,)).run_decompositions({})
    assert exported_program_has_symbolic_input_shape(ep)
    assert gone is None or gone in code(ep), code(ep)
    for each in (change, *then):
        each(ep.graph_module)
        ep.graph_module.graph.eliminate_dead_code()
        ep.graph_module.graph.lint()
    assert gone is None or gone not in code(ep), code(ep)
    assert new is None or new in code(ep), code(ep)
    shorter = tuple(t[: len(t) - 1] if dims and 0 in dims else t for t, dims in zip(args, free))
    for given in (args, shorter):
        torch.testing.assert_close(ep.module()(*given), call(*given), atol=1e-5, rtol=1e-5)

x, rows = torch.randn(5, 4, 6), {0: Dim("rows")}
to_op = (replace_dynamic_view_with_xla_op,)
for dim, at in ((1, 2), (-1, -2)):
    check(lambda x: x.select(dim, at), (x,), (rows,), decompose_dynamic_shape_select, "aten.select", "aten.view")
    check(lambda x: x.select(dim, at), (x,), (rows,), decompose_dynamic_shape_select, "aten.select",
          "xla.dynamic_view", to_op)
check(lambda x: x[0], (x,), (rows,), decompose_dynamic_shape_select, None, "aten.select")
check(lambda x: aten.split_with_sizes(x, [1, 2, 3], -1)[1] * 2, (x,), (rows,), decompose_split_with_sizes,
      "split_with_sizes", "aten.slice")
check(lambda x: aten.slice(x * 2, 1, 0, 2**63 - 1) + x[:, 1:2], (x,), (rows,), remove_no_op_slice, "1, 0, 92233")
check(lambda x: x.unsqueeze(-1), (x,), (rows,), dynamic_unsqueeze_to_view, "aten.unsqueeze", "aten.view")
for call in (lambda x: x.view(x.shape[0], -1), lambda x: x.view(x.shape[0] * 4, 6)):
    check(call, (x,), (rows,), replace_dynamic_view_with_xla_op, "aten.view", "xla.dynamic_view")
check(lambda x, y: y.expand(x.shape[0], -1), (x, torch.randn(1, 3)), (rows, None), replace_dynamic_expand_with_xla_op,
      "aten.expand", "xla.dynamic_expand")
table, indices = torch.randn(7, 3), torch.randint(7, (4, 5))
check(aten.embedding.default, (table, indices), (None, rows), flatten_embedding_indices_tensor, None,
      "xla.dynamic_view", to_op)

norm = torch.nn.LayerNorm((4, 6))
scale, shift = norm.weight.detach() * 2, norm.bias.detach() + 1
check(lambda x: aten.native_layer_norm(x, [4, 6], scale, shift, 1e-5)[0], (x,), (rows,),
      decompose_dynamic_native_layer_norm, "aten.native_layer_norm", "aten.rsqrt")
check(lambda x: aten.native_layer_norm(x, [4, 6], None, None, 1e-5), (x,), (rows,), decompose_dynamic_native_layer_norm,
      None, "aten.native_layer_norm")
weight, bias = torch.randn(4), torch.randn(4)
for given in ((weight, bias), (None, None)):
    for groups in (2, 4):
        torch.testing.assert_close(
            native_group_norm_impl(x, *given, 5, 4, 6, groups, 1e-5), F.group_norm(x, groups, *given, 1e-5)
        )
torch.testing.assert_close(native_layer_norm_impl(x, [6], None, None, 1e-5), F.layer_norm(x, [6]))

def whole(x):
    y = F.layer_norm(x[:, 1] * 2, [6]).unsqueeze(1).expand(x.shape[0], 4, 6)
    return torch.cat(y.split([1, 3], 1), 1).reshape(x.shape[0], -1)

ep = export(Model(whole), (x,), dynamic_shapes=((rows,),)).run_decompositions({})
process_exported_program_with_symbolic_input(ep)
assert "xla.dynamic_view" in code(ep) and "aten.select" not in code(ep) and "split_with_sizes" not in code(ep)
torch.testing.assert_close(ep.module()(x[:3]), whole(x[:3]), atol=1e-5, rtol=1e-5)
assert not exported_program_has_symbolic_input_shape(export(Model(torch.exp), (x,)))
"""


def test_passes_keep_the_results(tmp_path: Path) -> None:
    run(tmp_path, CODE)
