"""Environment variables that decide what PyTorch's compiler makes of a graph.

They are part of the key of a compiled program (`request`), and the compiler's process gets them (`compiler_process`).
Imports no PyTorch.
"""

import functools
import os

__all__ = ["compiler_variables", "is_decisive"]

# Variables that PyTorch's compiler reads, and those of them that only say where and how fast it works.
_READ = ("TORCHINDUCTOR_", "TORCH_COMPILE_", "AOT_INDUCTOR_", "AOTINDUCTOR_", "ATEN_CPU_CAPABILITY")
_WHERE = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_WORKER_START",
)


@functools.cache
def compiler_variables() -> dict[str, str]:
    """Environment variables that decide what is compiled, as they were when they were first asked for.

    The compiler's process is started with these: its programs are those that the key says.
    """
    return {name: os.environ[name] for name in sorted(os.environ) if is_decisive(name)}


def is_decisive(name: str) -> bool:
    """Whether an environment variable is one of those that decide what is compiled."""
    return name.startswith(_READ) and name not in _WHERE
