"""Checkpoints of a job: its state at a step, whole or not there, restored by any number of processes.

Layers: layout | lock, commit, transaction | reading, agreement, random_state, resplit, stopping | checkpointer.
"""

from ltc_dist.checkpoint.checkpointer import Checkpointer
from ltc_dist.checkpoint.reading import Checkpoint, latest_checkpoint
from ltc_dist.checkpoint.stopping import Stopped

__all__ = ["Checkpoint", "Checkpointer", "Stopped", "latest_checkpoint"]
