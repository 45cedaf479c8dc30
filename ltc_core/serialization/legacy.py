"""Read a streaming checkpoint of torch_xla or lazy_tensor_core: `load_legacy`.

Their format is a pickle at `path`, with a TensorReference in the place of each tensor, and the tensors in
`path + ".tensors/tensor_3.pt"`. Both are read with weights_only=True. A class of this file is read in the place of
their TensorReference, so that neither package is needed.
"""

import os

import torch

from ltc_core.errors import CheckpointError, CheckpointFormatError
from ltc_core.serialization.plain import load as load_plain
from ltc_core.serialization.tree import map_leaves

_NAMES = (
    "torch_xla.utils.serialization.TensorReference",
    "lazy_tensor_core.utils.serialization.TensorReference",
)


class TensorReference:
    """Read in the place of their class of that name; holds the number of a tensor."""

    tid: object = None


def tensors_folder(path: str) -> str:
    """Return where the tensors of such a checkpoint are."""
    return f"{path}.tensors"


def load_legacy(path: str) -> object:
    """Load such a checkpoint to the CPU.

    Raises:
        CheckpointError: a file is missing or damaged.
        CheckpointFormatError: a file needs code to be run, or is a link.
        CheckpointIOError: a file cannot be read.
    """
    with torch.serialization.safe_globals([(TensorReference, name) for name in _NAMES]):
        skeleton = load_plain(path)

    def fetch(reference: TensorReference) -> object:
        if type(reference.tid) is not int:
            raise CheckpointFormatError(
                f"{path} makes no sense: a tensor has the number {reference.tid!r:.200}",
                next="it was not written by xser.save; do not use it.",
            )
        return _load_tensor(os.path.join(tensors_folder(path), f"tensor_{reference.tid}.pt"))

    return map_leaves(lambda item: isinstance(item, TensorReference), fetch, skeleton)


def _load_tensor(file: str) -> object:
    if not os.path.lexists(file):
        raise CheckpointError(
            f"{file}: missing", next="copy the checkpoint again, with its '.tensors' folder."
        )
    if os.path.islink(file) or not os.path.isfile(file):
        raise CheckpointFormatError(
            f"{file}: a link, a directory or a device instead of a file",
            next="it was not written by xser.save; do not use it.",
        )
    return load_plain(file)
