"""Environment variables that change the code that PyTorch's compiler generates.

They are part of a compiled program's key (`request`), and are set in the compiler's process (`compiler_process`). This
module does not import PyTorch.
"""

import functools
import os

__all__ = ["compiler_variables", "is_decisive"]

# Prefixes of the variables that PyTorch's compiler reads, and those variables that do not change its code.
_READ = ("TORCHINDUCTOR_", "TORCH_COMPILE_", "AOT_INDUCTOR_", "AOTINDUCTOR_", "ATEN_CPU_CAPABILITY")
_WHERE = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_WORKER_START",
)


@functools.cache
def compiler_variables() -> dict[str, str]:
    """Environment variables that change the generated code, with their values at the first call.

    The compiler's process is started with these values, so that its programs match their keys.
    """
    return {name: os.environ[name] for name in sorted(os.environ) if is_decisive(name)}


def is_decisive(name: str) -> bool:
    """Whether an environment variable changes the generated code."""
    return name.startswith(_READ) and name not in _WHERE
