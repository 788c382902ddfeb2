"""Runs a method that cannot be one graph in eager PyTorch, and the submodules that it calls as compiled graphs.

    pieces = Pieces(model, make)
    pieces.run(model.forward, args, kwargs)      # eager: a branch on the numbers of a tensor, print, .item()
        layer(x)                                 # a child with children: compiled, or in pieces itself
        self.dropout(x) + self.scale             # leaves and the model's own parameters: eager, gathered before

The border is that of modules, so what is eager is what the source of one `forward` says. Where ranks share the
parameters and that source reads those of a submodule itself, such as `F.linear(x, self.layer.weight)`, the submodules
are eager too, with whole weights. So they are where it asks them for what compiled ones do not have, such as second
derivatives. `redirected.py` says which single calls of a submodule are eager.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn.utils.stateless import _reparametrize_module

from thunder_memsave.compiler.pieces.first_state import FirstState
from thunder_memsave.compiler.pieces.from_host import copied_from_host
from thunder_memsave.compiler.pieces.recomputed import recomputed_within
from thunder_memsave.compiler.pieces.redirected import FORWARD, OnlyEagerError, Run, redirected
from thunder_memsave.distributed.agreement import numbers_of_all
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import CaptureError, DoubleBackwardError
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.sharding.eager_parameter import is_written, whole_for_eager
from thunder_memsave.sharding.row_errors import ShardedParameterError
from thunder_memsave.sharding.same_on_all_ranks import RankMismatchError

_log = logging.getLogger(__name__)

_ENDS = -1
_ONE_THREAD = threading.RLock()
"""Held while functions stand in the place of the `forward` of modules: another thread would take them for theirs."""
_NOT_OF_PIECES = (ShardedParameterError, DoubleBackwardError, OnlyEagerError, TorchDynamoException)
"""Eager code asks submodules for what only eager ones with whole weights have: those weights, second derivatives,
transforms, a graph of its own (`torch.cond`)."""


class Pieces:
    """The submodules of one module that run compiled while its own code runs in eager PyTorch."""

    def __init__(
        self,
        module: nn.Module,
        make: Callable[[nn.Module], Run],
        data_parallel: DataParallel | None,
    ) -> None:
        """Compile nothing yet.

        Args:
            module: The module whose own code is eager.
            make: Returns what runs in the place of a submodule's `forward`.
            data_parallel: The ranks that share the parameters; None on one device.
        """
        self._data_parallel = data_parallel
        self._module = module
        compiled, self._eager = _divided(module)
        self._runs = {
            child: self._agreed(number, make(child)) for number, child in enumerate(compiled)
        }
        self._has_run = False

    @property
    def num_compiled(self) -> int:
        """The number of submodules that are compiled."""
        return len(self._runs)

    def run(self, function: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `function`, the module's own method.

        Raises:
            CaptureError: it changes a sharded parameter in place, which would be lost, or checkpoints a submodule by
                `use_reentrant=True`, and ranks share its parameters.
            RankMismatchError: the ranks call different submodules.
        """
        if self._has_run:
            return self._run(function, args, kwargs)
        before = FirstState.of(self._module)
        try:
            result = self._run(function, args, kwargs)
        except _NOT_OF_PIECES as error:
            before.restore()
            self.make_all_eager()
            _log.warning(
                "All of %s runs in eager PyTorch, with whole weights: %s",
                type(self._module).__name__,
                error,
            )
            result = self._run(function, args, kwargs)
        self._has_run = True
        return result

    def _run(self, function: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._surroundings(), recomputed_within(self._surroundings):
            result = function(*args, **kwargs)
        self._agree(_ENDS)
        return result

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Let eager code read whole weights, and call compiled submodules."""
        read = copied_from_host(self._module, self._eager)
        with _ONE_THREAD, self._gathered(), read, redirected(self._runs, apart=self._apart):
            yield

    @property
    def _apart(self) -> str:
        """Why a submodule that is compiled cannot be called as it is; empty if it can."""
        if self._data_parallel is not None:
            return "ranks share its parameters"
        is_on_host = any(place_of(p) is not None for p in self._module.parameters())
        return "weights are on the host (memory.offload_weights)" if is_on_host else ""

    def _agreed(self, number: int, run: Run) -> Run:
        def runs(*args: Any, **kwargs: Any) -> Any:
            self._agree(number)
            return run(*args, **kwargs)

        return runs

    def _agree(self, number: int) -> None:
        """Refuse that ranks go on with different submodules: their collectives would be of different parameters."""
        if self._data_parallel is None:
            return
        numbers = numbers_of_all(number, self._data_parallel)
        if len(set(numbers)) > 1:
            at = ", ".join(f"rank {rank} {self._named(n)}" for rank, n in enumerate(numbers))
            raise RankMismatchError(
                f"the ranks call different submodules of {type(self._module).__name__} at the same point: {at}. Every "
                "rank must call the same ones in the same order, because gathering parameters and averaging gradients "
                "are steps of all; use a mask or torch.where in the place of a branch that depends on a rank's numbers."
            )

    def _named(self, number: int) -> str:
        if number == _ENDS:
            return "ends"
        child = list(self._runs)[number]
        name: str = next(n for n, m in self._module.named_modules() if m is child)
        return name

    def make_all_eager(self) -> None:
        """Compile no submodule from now on: all of the module runs in eager PyTorch, with whole weights."""
        self._runs = {}
        self._eager = dict(self._module.named_parameters(remove_duplicate=False))

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Give eager code whole parameters whose gradients are averaged over the ranks."""
        if self._data_parallel is None:
            yield
            return
        parameters = list({id(p): p for p in self._eager.values()}.values())
        with _tracking_versions():
            gathered = whole_for_eager(parameters, self._data_parallel)
        whole = {id(p): w for p, w in zip(parameters, gathered, strict=True)}
        versions = {key: w._version for key, w in whole.items()}
        given = {name: whole[id(p)] for name, p in self._eager.items()}
        with _reparametrize_module(self._module, given):
            yield
        for name, p in self._eager.items():
            written = whole[id(p)]._version != versions[id(p)]
            if written or is_written(whole[id(p)], p, self._data_parallel):
                raise CaptureError(
                    f"{type(self._module).__name__} changes its parameter {name!r} in place in code that cannot be "
                    "captured, and the change would be lost: every rank keeps only rows of it. Change it outside of "
                    "the call, within fabric.strategy.summon_full(model, writeback=True)."
                )


@contextmanager
def _tracking_versions() -> Iterator[None]:
    """Make tensors that count their changes, also in `torch.inference_mode`."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _divided(module: nn.Module) -> tuple[list[nn.Module], dict[str, nn.Parameter]]:
    """Return the submodules to compile, and by name the parameters that eager code reads."""
    compiled: dict[nn.Module, None] = {}
    eager = dict(module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if not any(True for _ in child.children()):
            eager |= {f"{name}.{n}": p for n, p in child.named_parameters()}
        elif _is_called(child):
            compiled[child] = None
        else:  # a list of modules: what is in it is called
            inner, parameters = _divided(child)
            compiled |= dict.fromkeys(inner)
            eager |= {f"{name}.{n}": p for n, p in parameters.items()}
    return list(compiled), eager


def _is_called(module: nn.Module) -> bool:
    return getattr(type(module), FORWARD) is not nn.Module.forward
