"""`torch_xla._dynamo.dynamo_bridge`: the parts that scripts and tools call."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ltc_core import metrics
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_dist.compat.torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

__all__ = [
    "GraphInputMatcher",
    "NoneRemover",
    "UnsupportedNodesCollector",
    "alias_with_buffer_donor_config",
    "extract_compiled_graph",
    "get_fallback_ops",
]

get_fallback_ops = metrics.executed_fallback_ops


class GraphInputMatcher:
    """Finds the inputs of a graph for other arguments; called with these, it returns the inputs.

    Args:
        tensor_id_to_arg_idx: id of each argument -> its position.
        graph_input_tensor_ids, graph_input_xla_values: ids and tensors of the graph's inputs, as
            `_XLAC._get_tensors_xla_device_data_node` returns them.
        xla_args_tensor_id: ids of the arguments.

    Attributes:
        graph_input_xla_values: inputs that are no arguments, such as weights, which are kept; None for the others.
        arg_idxs: position among the arguments of each input, or None.
    """

    def __init__(
        self,
        tensor_id_to_arg_idx: Mapping[int, int],
        graph_input_tensor_ids: Sequence[int],
        graph_input_xla_values: Sequence[torch.Tensor],
        xla_args_tensor_id: Container[int],
    ) -> None:
        self.tensor_id_to_arg_idx = tensor_id_to_arg_idx
        self.graph_input_tensor_ids = list(graph_input_tensor_ids)
        pairs = zip(graph_input_tensor_ids, graph_input_xla_values, strict=True)
        self.graph_input_xla_values = [
            None if number in xla_args_tensor_id else t for number, t in pairs
        ]
        self.arg_idxs = [tensor_id_to_arg_idx.get(number) for number in graph_input_tensor_ids]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        pairs = zip(self.graph_input_xla_values, self.arg_idxs, strict=True)
        return [kept if at is None else args[at] for kept, at in pairs]


class UnsupportedNodesCollector(torch.fx.Interpreter):
    """Runs a graph, and notes the nodes that torch_xla leaves out of a program of the device.

    These fall back to the CPU, or take or return a tensor of another device.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self._unsupported_nodes: list[torch.fx.Node] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node."""
        before = metrics.num_fallbacks()
        result = super().run_node(n)
        operands = self.fetch_args_kwargs_from_env(n)
        tensors = [t for t in pytree.tree_leaves((operands, result)) if isinstance(t, torch.Tensor)]
        is_here = all(isinstance(t, LazyTensor) for t in tensors)
        if metrics.num_fallbacks() != before or not is_here:
            self._unsupported_nodes.append(n)
        return result

    def get_unsupported_nodes(self) -> list[torch.fx.Node]:
        """The nodes, in the order of the graph."""
        return self._unsupported_nodes


class NoneRemover:
    """Takes the None out of a list or tuple, and puts them back; `none_poslist` has their positions.

    A list is changed in place and returned, a tuple made anew.
    """

    def __init__(self) -> None:
        self.none_poslist: list[int] = []

    def remove_nones(self, value_list: Any) -> Any:
        """What a list or tuple has besides None."""
        self.none_poslist += [at for at, value in enumerate(value_list) if value is None]
        return self._replaced(value_list, [value for value in value_list if value is not None])

    def add_nones(self, value_list: Any) -> Any:
        """A list or tuple with None at the positions that were noted."""
        values = list(value_list)
        for at in self.none_poslist:
            values.insert(at, None)
        return self._replaced(value_list, values)

    @staticmethod
    def _replaced(given: Any, values: list[Any]) -> Any:
        if isinstance(given, tuple):
            return tuple(values)
        given[:] = values
        return given


def extract_compiled_graph(
    xla_model: torch.nn.Module, xla_args: Sequence[Any]
) -> Callable[..., Any]:
    """Return a function of the arguments that calls the module: its calls are recorded."""
    return xla_model.__call__
