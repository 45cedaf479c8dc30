"""`torch_xla.utils.checkpoint_tagger`: names for checkpoints; a checkpoint without a name is removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["CheckpointTagger"]


class CheckpointTagger:
    """Names for paths, such as 'best' and 'last'.

    Args:
        remover: called with a path that has lost its last name.

    Attributes:
        tags: name -> path.
    """

    def __init__(self, remover: Callable[[str], Any] | None = None) -> None:
        self.tags: dict[str, str] = {}
        self._remover = remover

    def tag(self, name: str, path: str) -> None:
        """Make `name` stand for `path` from now on."""
        old_path = self.tags.get(name)
        self.tags[name] = path
        if self._remover is not None and old_path is not None:
            if old_path not in self.tags.values():
                self._remover(old_path)

    def save_to_json(self) -> str:
        """Return the names as text."""
        return json.dumps(self.tags)

    @classmethod
    def load_from_json(
        cls, str_json: str, remover: Callable[[str], Any] | None = None
    ) -> CheckpointTagger:
        """Make one with the names of a text from `save_to_json`."""
        made = cls(remover)
        made.tags.update(json.loads(str_json))
        return made
