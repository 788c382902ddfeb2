"""What `fabric.save` and `fabric.load` do."""

from thunder_memsave.agreement import CheckpointError
from thunder_memsave.checkpoints.module_state import (
    StateMismatchError,
    load_state_dict,
    local_state_dict,
    unsharded_state_dict,
)
from thunder_memsave.checkpoints.save_load import load_checkpoint, load_raw, save_checkpoint

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
