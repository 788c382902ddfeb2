"""The policy for optimizer steps with non-finite gradients: the same decision on every rank."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.agreement import is_rank_zero
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.sharding.gradients import are_finite
from thunder_memsave.sharding.sharded_parameter import is_sharded

Policy = Literal["ignore", "skip", "stop"]

_log = logging.getLogger(__name__)


class NonfiniteGradientsError(ThunderMemsaveError, ArithmeticError):
    """A gradient is infinite or NaN, so the optimizer step was not taken on any rank."""


@dataclass(frozen=True, slots=True)
class _Clipped:
    """Gradients whose norm is known, with their versions, so that a later backward is noticed."""

    grads: tuple[tuple[weakref.ref[Tensor], int], ...]
    is_finite: bool

    @classmethod
    def of(cls, parameters: list[nn.Parameter], *, is_finite: bool) -> _Clipped:
        return cls(tuple((weakref.ref(g), g._version) for g in _grads(parameters)), is_finite)

    def are(self, parameters: list[nn.Parameter]) -> bool:
        now = _grads(parameters)
        return len(now) == len(self.grads) and all(
            known() is grad and version == grad._version
            for grad, (known, version) in zip(now, self.grads, strict=True)
        )


class NonfiniteGradients:
    """Decides before every optimizer step whether to take it, on all ranks alike."""

    def __init__(self, policy: Policy) -> None:
        """Set the policy: take the step anyway, skip it, or raise an error."""
        self.policy = policy
        self.num_skipped = 0
        self._clipped: _Clipped | None = None

    def note_norm(
        self, parameters: list[nn.Parameter], norm: Tensor, *, data_parallel: DataParallel | None
    ) -> None:
        """Remember the norm that clipping found, if it covers all ranks, so that the step need not reduce again."""
        if self.policy == "ignore" or not _is_of_all_ranks(parameters, data_parallel):
            return
        self._clipped = _Clipped.of(parameters, is_finite=bool(torch.isfinite(norm)))

    def allows_step(
        self, optimizer: Optimizer, *, precision: Precision, data_parallel: DataParallel | None
    ) -> bool:
        """Tell whether to take the step. A collective, unless clipping has just found the norm.

        Raises:
            NonfiniteGradientsError: the gradients are non-finite and the policy is to stop; on every rank.
        """
        if self.policy == "ignore" or has_scaler(precision):
            return True
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clipped, self._clipped = self._clipped, None
        if clipped is not None and clipped.are(parameters):
            finite = clipped.is_finite
        else:
            finite = are_finite(parameters, data_parallel=data_parallel)
        if not finite:
            self._refuse_step(data_parallel)
        return finite

    def _refuse_step(self, data_parallel: DataParallel | None) -> None:
        if self.policy == "stop":
            raise NonfiniteGradientsError(
                "the step was not taken on any rank: a gradient is infinite or not a number; lower the learning "
                "rate, clip gradients, check the data and the loss, or set strategy.nonfinite_gradients to 'skip' "
                "to leave such steps out."
            )
        self.num_skipped += 1
        if is_rank_zero(data_parallel):
            _log.warning(
                "left out an optimizer step on all ranks: a gradient is infinite or not a number "
                "(%d steps left out so far)",
                self.num_skipped,
            )


def has_scaler(precision: Precision) -> bool:
    """Tell whether a gradient scaler skips such steps by itself, and lowers its scale."""
    scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
    return scaler is not None and bool(scaler.is_enabled())


def refuse_stop_with_scaler(policy: Policy, precision: Precision) -> None:
    """Refuse the policy `stop` with a gradient scaler, which finds its scale by overflowing.

    Raises:
        ConfigError: the two are combined.
    """
    if policy == "stop" and has_scaler(precision):
        raise ConfigError(
            "nonfinite_gradients is 'stop', but with precision 16-mixed the gradient scaler finds its scale by "
            "overflows, and leaves out their steps itself; use 'ignore' or 'skip', or the precision bf16-mixed."
        )


def refuse_scaler(precision: Precision) -> None:
    """Refuse a gradient scaler, which looks at all gradients before the update, where backward updates.

    Raises:
        ConfigError: the precision has one.
    """
    if has_scaler(precision):
        raise ConfigError(
            "memory.optimizer_in_backward is true, but with precision 16-mixed the gradient scaler looks at all "
            "gradients before the update; use the precision bf16-mixed, or leave optimizer_in_backward out.",
            key="memory.optimizer_in_backward",
        )


def refuse_closure(policy: Policy) -> None:
    """Refuse a closure, which computes gradients inside the step, where they cannot be checked before.

    Raises:
        ConfigError: the policy needs to check them.
    """
    if policy != "ignore":
        raise ConfigError(
            f"nonfinite_gradients is {policy!r}, but optimizer.step(closure) makes gradients inside the step, where "
            "they cannot be checked; run backward before optimizer.step(), or set it to 'ignore'."
        )


def _is_of_all_ranks(parameters: list[nn.Parameter], data_parallel: DataParallel | None) -> bool:
    """Tell whether a norm covers all ranks' gradients; each rank sees only its own of replicated ones."""
    if data_parallel is None:
        return True
    return data_parallel.replicas is None and all(map(is_sharded, parameters))


def _grads(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
