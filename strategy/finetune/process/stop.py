"""Reasons for a run to end before its last step, reported in one message instead of a traceback."""

from __future__ import annotations

from typing import ClassVar

from thunder_memsave.errors import ThunderMemsaveError

OUT_OF_MEMORY = 4
"""Exit code for a device out of memory; 3 is a budget that no plan fits."""

LESS_MEMORY = "use more processes with strategy.sharding zero3"
"""Changes that a run may make when it resumes from a checkpoint."""

LESS_MEMORY_OF_A_NEW_RUN = "a smaller data.max_seq_length, or lora"


class RunStoppedError(ThunderMemsaveError):
    """A run ended before its last step; the message names the step and what to do."""

    code: int = 1
    is_of_all_ranks: ClassVar[bool] = True
    """Whether every rank ends for this reason, so that one message is enough."""


class RunInterruptedError(RunStoppedError):
    """Ctrl-C, SIGTERM or SIGUSR1 ended the run.

    Args:
        message: Text for the user.
        code: 130 for Ctrl-C, `signals.EXIT_SAVED` for the others if all is saved, else 128 plus the signal.
        is_own: Whether this process got the signal itself, not from another rank.
    """

    def __init__(self, message: str = "", *, code: int = 130, is_own: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.is_own = is_own


class BadStepError(RunStoppedError):
    """A step was not taken, on any rank, because of its loss or its gradients."""


class NotFiniteError(BadStepError):
    """A loss or a gradient norm is infinite or NaN, on every rank."""


class LossSpikeError(BadStepError):
    """A loss is far above the recent ones."""


class ProcessDiedError(RunStoppedError):
    """Another process on this machine ended, so the run cannot go on."""

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class RankLostError(RunStoppedError):
    """Another rank did not join a collective; each rank reports what it waited for."""

    is_of_all_ranks = False


class DeviceMemoryError(RunStoppedError):
    """The device had less memory left than the plan expected, at least on this rank."""

    code = OUT_OF_MEMORY
    is_of_all_ranks = False
