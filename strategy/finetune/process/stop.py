"""Why a run ended before its last step: told in one message, not in a traceback."""

from __future__ import annotations

from typing import ClassVar

from thunder_memsave.errors import ThunderMemsaveError

OUT_OF_MEMORY = 4
"""The exit code; 3 is a budget that no plan fits."""

LESS_MEMORY = "use more processes with strategy.sharding zero3"
"""What a run may change that goes on from a checkpoint."""

LESS_MEMORY_OF_A_NEW_RUN = "a smaller data.max_seq_length, or lora"


class RunStoppedError(ThunderMemsaveError):
    """A run ended before its last step; the message says at which one, and what to do."""

    code: int = 1
    is_of_all_ranks: ClassVar[bool] = True
    """Whether every rank ends for this reason, so that one message is enough."""


class RunInterruptedError(RunStoppedError):
    """Ctrl-C, SIGTERM or SIGUSR1.

    Args:
        message: For the user.
        code: 130 for Ctrl-C, `signals.EXIT_SAVED` for the others where all is saved, else 128 and the signal.
        is_own: This process got the signal, rather than hearing of it from another rank.
    """

    def __init__(self, message: str = "", *, code: int = 130, is_own: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.is_own = is_own


class BadStepError(RunStoppedError):
    """A step was not taken, on any rank, because of its loss or its gradients."""


class NotFiniteError(BadStepError):
    """A loss or a norm of gradients is infinite or not a number, on every rank."""


class LossSpikeError(BadStepError):
    """A loss is far above those before."""


class ProcessDiedError(RunStoppedError):
    """Another process of this machine ended, so that the run cannot go on."""

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class RankLostError(RunStoppedError):
    """Another rank did not come to a collective; each rank says what it waited for."""

    is_of_all_ranks = False


class DeviceMemoryError(RunStoppedError):
    """The device had less memory left than the plan expected, on this rank at least."""

    code = OUT_OF_MEMORY
    is_of_all_ranks = False
