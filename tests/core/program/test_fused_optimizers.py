"""The arithmetic of fused optimizers beside ATen's kernels: numbers as tensors, scales, skipped steps."""

from typing import Any

import pytest
import torch

from ltc_core.program.scalar_inputs import WHOLE_RULES

aten = torch.ops.aten
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
ADAGRAD = {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8}
SGD = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.01, "dampening": 0.2}
PLAIN = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.01, "dampening": 0.0}
# Name of the op, its lists of tensors, those of them that are steps, numbers, flags.
CALLS: dict[str, tuple[str, int, int, dict[str, float], dict[str, bool]]] = {
    "adam": ("_fused_adam_", 4, 1, ADAM, {"amsgrad": False}),
    "amsgrad": ("_fused_adam_", 5, 1, ADAM, {"amsgrad": True}),
    "adamw": ("_fused_adamw_", 4, 1, ADAM, {"amsgrad": False}),
    "adagrad": ("_fused_adagrad_", 3, 1, ADAGRAD, {}),
    "sgd": ("_fused_sgd_", 2, 0, PLAIN, {"nesterov": False, "is_first_step": False}),
    "momentum": ("_fused_sgd_", 3, 0, SGD, {"nesterov": False, "is_first_step": False}),
    "first momentum": ("_fused_sgd_", 3, 0, SGD, {"nesterov": False, "is_first_step": True}),
    "nesterov": ("_fused_sgd_", 3, 0, SGD, {"nesterov": True, "is_first_step": False}),
}


def operands(name: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    op, count, num_steps, _, _ = CALLS[name]
    g = torch.Generator().manual_seed(0)
    lists = [[torch.randn(4, 5, generator=g).to(dtype) for _ in range(3)] for _ in range(count)]
    lists[2:] = [[t.abs() for t in column] for column in lists[2:]]
    num_lists = sum(
        a.type.kind() == "ListType" for a in getattr(aten, op).default._schema.arguments
    )
    lists += [[] for _ in range(num_lists - num_steps - count)]
    return lists + [[torch.tensor(4.0) for _ in range(3)] for _ in range(num_steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", ["plain", "maximize", "scaled", "skipped"])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_atens(name: str, options: str, dtype: torch.dtype) -> None:
    op, _, _, numbers, flags = CALLS[name]
    named: dict[str, Any] = {**flags, "maximize": options == "maximize"}
    if options in ("scaled", "skipped"):
        named["grad_scale"] = torch.tensor(8.0)
        named["found_inf"] = torch.tensor(float(options == "skipped"))
    # In float32 for bfloat16, too: there ATen's own fused SGD drops what it computes for whole vectors.
    expected = [[t.float() for t in column] for column in operands(name, dtype)]
    getattr(aten, op)(*expected, **numbers, **named)
    as_tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
    got = WHOLE_RULES[op](*operands(name, dtype), **as_tensors, **named)
    arguments = getattr(aten, op).default._schema.arguments
    written = [
        t.to(dtype if t.dim() else t.dtype)
        for column, argument in zip(expected, arguments, strict=False)
        if argument.alias_info is not None
        for t in column
    ]
    torch.testing.assert_close(got, written)
