"""Show what becomes of one training step: ops recorded, graph, program, buffers.

    python examples/stages.py

Nothing here is needed to train, and what it looks at inside ltc_core may change. Where to read on:
docs/architecture.md.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

import ltc_core as ltc
from ltc_core import debug
from ltc_core.program.plan import plan
from ltc_core.runtime import devices
from ltc_core.runtime.program_cache import CompiledGraph


def title(number: int, text: str) -> None:
    print(f"\n{'=' * 100}\n{number}. {text}\n{'=' * 100}")


@contextlib.contextmanager
def programs_run() -> Iterator[list[CompiledGraph]]:
    """Collect the program of each cut made in the block: `debug.on_cut` is told of every one."""
    seen: list[CompiledGraph] = []
    report = debug.on_cut
    debug.on_cut = lambda device, reason, compiled, elapsed_ns: seen.append(compiled)
    try:
        yield seen
    finally:
        debug.on_cut = report


def record_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Record forward, backward and optimizer. None of this computes anything yet."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def show_recorded(device: torch.device) -> None:
    title(1, "Recorded: each ATen call, in the order it came; those of backward come from autograd")
    trace = devices.context(device.index).trace
    for step in trace.path(trace.cursor):
        for number, meta in step.inputs:
            print(f"   input %{number}: {meta}")
        print(f"   {step.node}")


def show_graph(compiled: CompiledGraph) -> None:
    graph = compiled.graph
    dead = sum(compiled.recorded.values()) - len(graph.nodes)
    title(2, "Graph: what the cut at mark_step() took; each node with the line that recorded it")
    print(graph.text(lines=True))
    print(f"\n{len(graph.nodes)} nodes; {dead} more were recorded that nobody needs.")
    print(
        "outputs are what is still alive: the loss, the parameters, their gradients, the momenta."
    )
    print("donated inputs are values nobody can see after this step: their memory may be reused.")


def show_program(compiled: CompiledGraph) -> None:
    title(3, "Program: where each node writes, and what can be freed after it")
    memory = plan(compiled.graph)
    for node, in_place, frees in zip(
        compiled.graph.nodes, memory.in_place, memory.frees, strict=True
    ):
        notes = [f"writes {sum(in_place)} of {len(in_place)} in place"] if in_place else []
        notes += [f"then frees {', '.join(f'%{i}' for i in frees)}"] if frees else []
        print(f"   {str(node.op):32} {'; '.join(notes)}")
    print(f"\nintermediate values hold at most {memory.peak_bytes} bytes")
    for output, reused in memory.reuses.items():
        print(f"   output %{output} ends in the memory of input %{reused}")


def show_buffers(names: dict[str, torch.Tensor], before: dict[str, int]) -> None:
    title(4, "Buffers: what is on the device between two steps")
    for name, address in addresses(names).items():
        where = "in the same memory as before" if before.get(name) == address else "in new memory"
        print(f"   {name:16} {tuple(names[name].shape)!s:10} at {address:#x}, {where}")
    print(f"   bytes in use: {ltc.get_memory_info()['bytes_used']}")


def addresses(names: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return where each tensor's values lie; waits for the device."""
    ltc.wait_device_ops()
    return {name: devices.real(t._h, "Fetch").data_ptr() for name, t in names.items()}


def main() -> None:
    torch.manual_seed(0)
    device = ltc.lazy_device()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(16, 4).to(device), torch.randn(16, 1).to(device)
    record_step(model, optimizer, x, y)  # the first step also makes the momenta
    ltc.mark_step()
    record_step(model, optimizer, x, y)
    ltc.mark_step()

    names = dict(model.named_parameters())
    before = addresses(names)
    with programs_run() as programs:
        loss = record_step(model, optimizer, x, y)
        show_recorded(device)
        ltc.mark_step()
    show_graph(programs[0])
    show_program(programs[0])
    show_buffers({**names, "loss": loss}, before)

    title(5, "The next step takes the same path, so its program is there already")
    compiles = ltc.metrics.counter_value("UncachedCompile")
    loss = record_step(model, optimizer, x, y)
    ltc.mark_step()
    again = ltc.metrics.counter_value("UncachedCompile")
    print(f"programs built before it: {compiles}, after it: {again}; loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
