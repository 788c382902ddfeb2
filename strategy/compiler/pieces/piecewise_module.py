"""A compiled module that runs in pieces where it cannot be one graph (`run_pieces.py`)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from thunder_memsave.budget.pieces.piece_planner import PiecePlanner
from thunder_memsave.budget.pieces.pieces_budget import PiecesBudget
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.compiler.pieces.run_pieces import Pieces
from thunder_memsave.errors import CaptureError, CompileError
from thunder_memsave.frontend.calls import Call

_log = logging.getLogger(__name__)

_PROMISE = (
    "what eager code keeps is measured in the first step; from the second on memory.budget is kept"
)
_NO_PIECES = (
    "memory.budget, memory.recompute, several devices or strategy.fusion have submodules compiled"
)
STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""`forward`, and the steps of Lightning's modules. Other methods, such as `generate`, may call submodules with other
shapes each time; without gradients, where eager code keeps nothing, their submodules are not compiled."""
_numbers = count()
_Key = tuple[str, bool, bool]


class PiecewiseModule(CompiledModule):
    """Runs methods as one graph each; those that cannot be one as eager code that calls compiled submodules."""

    def __init__(self, module: nn.Module, *, may_be_split: bool = False, **settings: Any) -> None:
        """Compile nothing yet.

        Args:
            module: Whose methods are compiled when they are called.
            may_be_split: Whether what cannot be one graph runs in pieces; otherwise it is refused.
            **settings: As for `CompiledModule`.
        """
        super().__init__(module, **settings)
        self._may_be_split = may_be_split
        self.number = next(_numbers)
        """Rises from each module that is set up to the next."""
        self._pieces: dict[_Key, Pieces] = {}
        self._submodules: dict[nn.Module, _Submodule] = {}
        self._budget: PiecesBudget | None = None
        """The budget of the whole step, once the module runs in pieces; None: it has none."""
        self._planner_of_pieces: PiecePlanner | None = None
        self._said: set[tuple[type[nn.Module], _Key]] = set()
        """The classes and methods of which the log has said it; layers of one class are told about once."""

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the bound method `name` of the module.

        Raises:
            CaptureError: it cannot be captured as one graph, and may not be split.
            CompileError: it cannot be compiled to what eager PyTorch computes, and may not be split.
        """
        key = name, self.module.training, torch.is_grad_enabled()
        if key in self._pieces:
            return self._run_pieces(self._pieces[key], name, args, kwargs)
        try:
            return self.call_method(name, *args, **kwargs)
        except (CaptureError, CompileError) as error:
            if not self._may_be_split:
                raise
            pieces = self._split(key, error)
            _forget_frames(error)
        # Kept if eager code can run it: a wrong batch is no reason to run the next one in pieces.
        result = self._run_pieces(pieces, name, args, kwargs)
        self._pieces[key] = pieces
        return result

    def _run_pieces(self, pieces: Pieces, name: str, args: Any, kwargs: Any) -> Any:
        run = partial(pieces.run, self._target(name), args, kwargs)
        return run() if self._budget is None else self._budget.forward(run, (args, kwargs))

    def backward_of_pieces(self, loss: Tensor) -> AbstractContextManager[None]:
        """Return a context around a step's backward, in which it is measured if its forward was."""
        return nullcontext() if self._budget is None else self._budget.backward(loss)

    @property
    def pieces_note(self) -> str:
        """The text that `explain()` has about a step in pieces that has a budget; empty for others."""
        return "" if self._budget is None else self._budget.describe()

    def _limit(self) -> None:
        """Give the step a budget, if there is one: that of the whole module."""
        planner = self.planner
        if self._budget is not None or planner is None or planner.budget_bytes is None:
            return
        self._budget = PiecesBudget(
            self.module,
            budget_bytes=planner.budget_bytes,
            beside=lambda: planner.memory_beside(0),
            data_parallel=self._data_parallel,
        )
        self._planner_of_pieces = PiecePlanner.of(planner, self._budget)

    def _split(self, key: _Key, reason: Exception) -> Pieces:
        self._limit()
        pieces = Pieces(self.module, self._compiled_forward, self._data_parallel)
        name, _, with_gradients = key
        if (name not in STEPS and not with_gradients) or not self._gains_by_pieces():
            pieces.make_all_eager()
        kind = type(self.module), key
        _log.log(
            logging.DEBUG if kind in self._said else logging.WARNING,
            "%s.%s runs in eager PyTorch, %d of its submodules compiled: %s (strategy.fullgraph refuses this; %s.)",
            type(self.module).__name__,
            name,
            pieces.num_compiled,
            reason,
            _PROMISE if pieces.num_compiled else _NO_PIECES,
        )
        self._said.add(kind)
        return pieces

    def _gains_by_pieces(self) -> bool:
        """Whether compiled submodules give what eager ones do not: less memory, shards, fused kernels, CUDA graphs.

        On one CPU, without those, a compiled submodule runs the operators of the eager one, and its call takes 0.3 ms
        more (`make architecture-steps`).
        """
        saves = self.planner is not None and self.planner.is_to_save
        on_cpu = all(t.is_cpu for t in (*self.module.parameters(), *self.module.buffers()))
        asked = saves or self._data_parallel is not None or self._config.fusion is True
        return asked or not on_cpu

    def _compiled_forward(self, module: nn.Module) -> Any:
        if module not in self._submodules:
            has_budget = self._planner_of_pieces is not None
            submodule = _Submodule(
                module,
                may_be_split=True,
                # Graphs have memory of their own, which is not measured.
                config=replace(self._config, cuda_graphs=False) if has_budget else self._config,
                data_parallel=self._data_parallel,
                planner=self._planner_of_pieces or self.planner,
            )
            submodule.unreduced, submodule._said = self.unreduced, self._said
            self._submodules[module] = submodule
        return self._submodules[module]

    @property
    @override
    def captures(self) -> Any:
        return (*super().captures, *(c for m in self._submodules.values() for c in m.captures))


def _forget_frames(error: BaseException | None) -> None:
    """Let go of the frames of an error and its causes: errors of Dynamo are in cycles, and would keep results alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _Submodule(PiecewiseModule):
    """Stands in for a submodule's `forward`: whoever calls the submodule runs its hooks."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module, **settings)
        planner = self.planner
        self._planner_of_pieces = planner if isinstance(planner, PiecePlanner) else None
        self._numbers: dict[int, int | None] = {}
        """The number of the piece, by that of what is compiled; None: it has no backward."""
        self._new: set[int] = set()
        """The numbers of what was compiled after the module had a plan for all lengths."""
        self._replaced: int | None = None
        """The piece whose new plan is made next."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("forward", *args, **kwargs)

    @override
    def _target(self, name: str) -> Any:
        return getattr(self.module, name)

    @override
    def _limit(self) -> None:
        """Leave it to the whole module."""

    @override
    def _find(self, name: str, call: Call) -> Compiled | None:
        known, planner = super()._find(name, call), self._planner_of_pieces
        if known is None or planner is None:
            return known
        piece = self._numbers[known.number]
        is_old = planner.pieces.has_plan_for_all(self.number) and known.number not in self._new
        if not planner.pieces.is_stale(piece) and (piece is None or not is_old):
            return known
        self._replaced = piece if planner.pieces.is_stale(piece) else None
        for compiled in (self._compiled, self._also):
            compiled[name] = [c for c in compiled.get(name, ()) if c.number != known.number]
        return None

    @override
    def _compile(self, name: str, call: Call) -> Compiled:
        planner, piece = self._planner_of_pieces, self._replaced
        if planner is None:
            return super()._compile(name, call)
        self._replaced = None
        with planner.pieces.compiling(piece, owner=self.number):
            compiled = super()._compile(name, call)
        self._numbers[compiled.number] = planner.piece
        if planner.pieces.has_plan_for_all(self.number):
            self._new.add(compiled.number)
        return compiled
