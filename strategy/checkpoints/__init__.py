"""Saves and loads the state of a run: sharded and full checkpoints, each complete or absent.

In: modules, optimizers and other state on all ranks. Out: files, and the same state on any number of ranks.
"""

from thunder_memsave.checkpoints.module_state import (
    StateMismatchError,
    load_state_dict,
    local_state_dict,
    unsharded_state_dict,
)
from thunder_memsave.checkpoints.save_load import load_checkpoint, load_raw, save_checkpoint
from thunder_memsave.distributed.agreement import CheckpointError

__all__ = [
    "CheckpointError",
    "StateMismatchError",
    "load_checkpoint",
    "load_raw",
    "load_state_dict",
    "local_state_dict",
    "save_checkpoint",
    "unsharded_state_dict",
]
