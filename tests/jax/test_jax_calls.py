"""Functions of JAX that a script for torch_xla calls with tensors: `xb.call_jax`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import jax
import jax.numpy as jnp
import ltc_core as ltc

device = torch_xla.device()
x = torch.randn(4, 4)
d = x.to(device)


def f(inputs, scale, *, names):
    a, b = inputs["a"], inputs["b"]
    return {names[0]: jnp.sin(a) @ b * scale, "largest": jnp.argmax(a, 1)}


for _ in range(4):  # the trace is kept, and so is the program
    out = xb.call_jax(f, ({"a": d * 2, "b": d + 1}, 3.0), {"names": ("sum",)})
    torch.testing.assert_close(out["sum"].relu().cpu(), ((2 * x).sin() @ (x + 1) * 3).relu())
    assert out["largest"].tolist() == x.argmax(1).tolist() and not out["sum"].requires_grad
assert xb._jax_to_xla_computation_cache_elements() == 1
xb.call_jax(f, ({"a": d, "b": d}, 4.0), {"names": ("sum",)})
xb.call_jax(f, ({"a": d[:2], "b": d}, 4.0), {"names": ("sum",)})
assert xb._jax_to_xla_computation_cache_elements() == 3
jax.config.update("jax_default_matmul_precision", "highest")
xb.call_jax(f, ({"a": d, "b": d}, 4.0), {"names": ("sum",)})
assert xb._jax_to_xla_computation_cache_elements() == 4

# A function made anew has a cache of its own, unless the caller says what stands for it.
for _ in range(2):
    twice = lambda a: a * 2
    kept = xb.call_jax(twice, (d,), override_hash="twice")
assert xb._jax_to_xla_computation_cache_elements() == 5
torch.testing.assert_close(kept.cpu(), x * 2)

gradients = xb.call_jax(jax.grad(lambda a, b: jnp.sum(a + jnp.sin(b)), argnums=(0, 1)), (d, d))
torch.testing.assert_close(gradients[0].cpu(), torch.ones(4, 4))
torch.testing.assert_close(gradients[1].cpu(), x.cos())

half = torch.randn(4, dtype=torch.bfloat16)
assert torch.equal(xb.call_jax(lambda a: a * 2, (half.to(device),)).cpu(), half * 2)
wide = torch.tensor([2**40], device=device)
assert xb.call_jax(lambda a: a + 1, (wide,)).tolist() == [2**40 + 1]
assert xb.call_jax(lambda a: jnp.arange(3) + a.sum().astype(int), (d * 0,)).dtype is torch.int32


# Their texts are equal, what they compute is not.
def looked_up(table):
    result = jax.ShapeDtypeStruct((), "float32")
    return lambda a: jax.pure_callback(lambda value: table(value), result, a.sum())


one, two = (xb.call_jax(looked_up(table), (d * 0,)).item() for table in (lambda v: v + 1, lambda v: v + 2))
assert (one, two) == (1.0, 2.0)
print("done", sorted(ltc.metrics.executed_fallback_ops()))
"""


@pytest.mark.parametrize("executor", ["jax", "reference"])
def test_functions_of_jax_are_called_with_tensors(executor: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "ltc_dist.compat", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, "LTC_EXECUTOR": executor, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("done")
    assert "call" not in done.stdout
