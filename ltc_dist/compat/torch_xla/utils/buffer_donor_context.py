"""`torch_xla.utils.buffer_donor_context`: whether syncs of some tensors donate the marked buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ltc_dist.compat.torch_xla import _XLAC

__all__ = ["alias_with_buffer_donor_config"]


@contextlib.contextmanager
def alias_with_buffer_donor_config(should_alias: bool = True) -> Iterator[None]:
    """Inside of the block, `_xla_sync_multi(..., sync_xla_data=False)` donates marked buffers, or does not."""
    before = _XLAC._xla_get_enable_alias_with_buffer_donor_config()
    _XLAC._xla_set_enable_alias_with_buffer_donor_config(should_alias)
    try:
        yield
    finally:
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(before)
