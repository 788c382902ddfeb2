"""What the loop remembers from step to step besides weights; a part of checkpoints."""

from __future__ import annotations

from typing import Any


class LoopState:
    """Which data a step trains on, and what the guards have seen; plain values, the same on all ranks."""

    def __init__(self) -> None:
        self.validation_is_due = False
        """A signal cut the evaluation after the last step short."""
        self.losses: list[float] = []
        """Of the last steps that were taken, the oldest first."""
        self.num_skips = 0
        """Steps left out in a row."""
        self.skipped: list[list[int]] = []
        """First and last position of data that no step trains on, in their order."""
        self.rolled_back_to = -1
        self.num_rollbacks = 0
        """To that step, one after the other."""

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            name: list(value) if isinstance(value, list) else value
            for name, value in vars(self).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        for name in vars(self).keys() & state_dict.keys():
            setattr(self, name, state_dict[name])

    def data_position(self, step: int) -> int:
        """The number of the global batch that a step trains on: its own, beyond what is skipped."""
        position = step
        for first, last in self.skipped:
            if position >= first:
                position += last - first + 1
        return position

    def note_taken(self, loss: float, *, window: int) -> None:
        """A step was taken; `window` losses are kept."""
        self.losses = [*self.losses, loss][-window:]
        self.num_skips = 0

    def note_rollback(self, *, step: int, bad_position: int, num_rollbacks: int) -> None:
        """Skip the data from a checkpoint to the bad step, now that the run is there again.

        Args:
            step: The checkpoint's.
            bad_position: Data position of the step that was bad.
            num_rollbacks: To this checkpoint, with this one; the checkpoint itself does not know.
        """
        self.skipped = [*self.skipped, [self.data_position(step), bad_position]]
        self.rolled_back_to, self.num_rollbacks = step, num_rollbacks
