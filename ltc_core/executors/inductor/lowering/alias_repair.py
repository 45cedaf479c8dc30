"""A repair of PyTorch's compiler: it wrote results in place into a part of memory that was still to be read.

The operands of `cat` may be computed where the result has them. Such a part is no memory of its own, but its last
reader wrote its result there, as into any operand that is not used again: into the result of `cat`. Other memory later
took the place of both. Used by `build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch._inductor.codegen.wrapper import PythonWrapperCodegen

__all__ = ["repaired"]

_can_reuse = PythonWrapperCodegen.can_reuse


def repaired() -> Any:
    """A context in which no result is written into a part of other memory."""
    return mock.patch.object(PythonWrapperCodegen, "can_reuse", _can_reuse_whole)


def _can_reuse_whole(wrapper: Any, source: Any, result: Any = None) -> bool:
    """Whether the memory of a source may be reused, by a result in place if one is given."""
    node = getattr(source, "node", None)
    is_part = result is not None and node is not None and node.get_inputs_that_alias_output()
    return not is_part and _can_reuse(wrapper, source, result)  # type: ignore[no-untyped-call]
