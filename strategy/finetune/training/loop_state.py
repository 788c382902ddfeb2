"""The loop's state besides weights, from step to step; a part of checkpoints."""

from __future__ import annotations

from typing import Any


class LoopState:
    """Skipped data and the history of the guards; plain values, the same on all ranks."""

    def __init__(self) -> None:
        self.validation_is_due = False
        """Whether a signal cut the evaluation after the last step short."""
        self.losses: list[float] = []
        """Losses of the last steps taken, the oldest first."""
        self.num_skips = 0
        """Consecutive steps left out."""
        self.skipped: list[list[int]] = []
        """First and last position of each skipped range of data, in order."""
        self.rolled_back_to = -1
        self.num_rollbacks = 0
        """Consecutive rollbacks to that step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        return {
            name: list(value) if isinstance(value, list) else value
            for name, value in vars(self).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""
        for name in vars(self).keys() & state_dict.keys():
            setattr(self, name, state_dict[name])

    def data_position(self, step: int) -> int:
        """Return the number of the global batch that a step trains on: its own plus the skipped ones before it."""
        position = step
        for first, last in self.skipped:
            if position >= first:
                position += last - first + 1
        return position

    def note_taken(self, loss: float, *, window: int) -> None:
        """Record the loss of a step that was taken, and keep the last `window` losses."""
        self.losses = [*self.losses, loss][-window:]
        self.num_skips = 0

    def note_rollback(self, *, step: int, bad_position: int, num_rollbacks: int) -> None:
        """Skip the data from a checkpoint to the bad step, after the rollback to that checkpoint.

        Args:
            step: The checkpoint's step.
            bad_position: Data position of the bad step.
            num_rollbacks: Rollbacks to this checkpoint, including this one; the checkpoint itself does not have it.
        """
        self.skipped = [*self.skipped, [self.data_position(step), bad_position]]
        self.rolled_back_to, self.num_rollbacks = step, num_rollbacks
