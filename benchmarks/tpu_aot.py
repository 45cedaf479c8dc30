"""Compile whole training steps for a TPU v5e, on a machine without one: `make tpu-aot`.

A step is recorded and runs on JAX's CPU devices; its program is then compiled for the devices of a topology, which the
package libtpu describes. On several chips parameters and batches are divided by `ltc_dist.spmd`. Each number of
chips has a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

from benchmarks.models import WORKLOADS, Workload

MODELS = ("mlp", "mnist", "gpt", "resnet")
# Chips -> the topology that has them; one chip is the first of four.
TOPOLOGIES = {1: "v5e:2x2", 4: "v5e:2x2", 8: "v5e:2x4"}
_STEPS = 5  # from the fourth on a step's first values are inputs
_COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter",
)  # fmt: skip
# libtpu asks the host for these, and waits for its metadata server otherwise.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used, and a process that was killed leaves its lock
    "LTC_EXECUTOR": "jax",
    "LTC_DEVICE": "cpu",
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What compiling a step for a TPU gave; `compile_s` are seconds of the processor."""

    compile_s: float
    bytes_a_chip: int
    aliased_bytes: int
    num_collectives: int
    num_fusions: int

    def __str__(self) -> str:
        return (
            f"{self.compile_s:6.1f} s, {self.bytes_a_chip / 2**20:6.1f} MiB a chip, "
            f"{self.aliased_bytes / 2**20:6.1f} MiB aliased, {self.num_collectives:3} collectives, "
            f"{self.num_fusions:4} fusions"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help=", ".join(WORKLOADS))
    parser.add_argument(
        "--chips", type=int, nargs="*", default=list(TOPOLOGIES), choices=TOPOLOGIES
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        for name in args.models:
            found = compiled_step(WORKLOADS[name], args.chips[0])
            print(f"{name:8} {args.chips[0]} chips: {found}", flush=True)
        return
    for chips in args.chips:
        command = [sys.executable, "-m", "benchmarks.tpu_aot", *args.models]
        environment = {**os.environ, **_ENVIRONMENT, "LTC_NUM_DEVICES": str(chips)}
        subprocess.run([*command, "--here", "--chips", str(chips)], env=environment, check=True)


def compiled_step(workload: Workload, chips: int) -> Figures:
    """Figures of a training step's program for that many chips."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(TOPOLOGIES[chips], "tpu").devices[:chips]
    launch = _recorded_step(workload, chips)
    started = time.process_time()
    compiled = _for_devices(launch, devices).compiled
    passed_s = time.process_time() - started
    memory, text = compiled.memory_analysis(), compiled.as_text()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Figures(
        passed_s,
        kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        len(re.findall(rf" (?:{'|'.join(_COLLECTIVES)})(?:-start)?\(", text)),
        len(re.findall(r" fusion\(", text)),
    )


def _recorded_step(workload: Workload, chips: int) -> Any:
    """The launch of a step that has run on the CPU."""
    import ltc_core as ltc
    from ltc_core.executors.device_program import launches
    from ltc_dist import spmd

    device = ltc.lazy_device()
    model = workload.model()
    mesh = spmd.Mesh(range(chips), (chips,), ("fsdp",))
    model = spmd.SpmdFullyShardedDataParallel(model, mesh=mesh) if chips > 1 else model.to(device)
    optimizer = workload.make_optimizer(model.parameters())
    before = set(map(id, launches()))
    for batch in workload.batches(_STEPS):
        data, target = (part.to(device) for part in batch)
        if chips > 1:
            for part in (data, target):
                spmd.mark_sharding(part, mesh, ("fsdp", *[None] * (part.ndim - 1)))
        optimizer.zero_grad()
        workload.loss(model(data), target).backward()
        optimizer.step()
        ltc.mark_step(wait=True)
    found = [one for one in launches() if id(one) not in before and one.runs > 1]
    if len(found) != 1:
        raise SystemExit(f"a step is {len(found)} programs, not one: {ltc.metrics.summary()}")
    return found[0]


def _for_devices(launch: Any, devices: Sequence[Any]) -> Any:
    """The same step, compiled for other devices."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding

    from ltc_core.executors.jax import mesh as jax_mesh
    from ltc_core.executors.jax.launch import JaxLaunch
    from ltc_core.program.passes.narrow_dtypes import StorageTypes

    numbers = {device: k for k, device in enumerate(jax_mesh.devices())}

    def there(sharding: Any) -> Any:
        if sharding is None:
            return None
        grid = np.vectorize(lambda one: devices[numbers[one]], otypes=[object])
        return NamedSharding(
            Mesh(grid(sharding.mesh.devices), sharding.mesh.axis_names), sharding.spec
        )

    subgraph = launch.subgraph
    graph = StorageTypes.for_xla().rewrite_all(subgraph.graph)
    subgraph = dataclasses.replace(subgraph, graph=graph)
    divided = [there(one) for one in launch.divided]
    jax_mesh.named.cache_clear()
    with mock.patch.object(jax_mesh, "devices", lambda: tuple(devices)):
        found = JaxLaunch(subgraph, devices[0], _Nowhere(), None, jax_mesh.DeviceMesh(), divided)
    jax_mesh.named.cache_clear()
    return found


class _Nowhere:
    """Stands for the programs on disk: there are none."""

    def key(self, text: str) -> str:
        return ""

    def load(self, *args: Any) -> None:
        return None

    def store(self, *args: Any) -> None:
        return None


if __name__ == "__main__":
    main()
