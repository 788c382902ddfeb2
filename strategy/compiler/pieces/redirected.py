"""Runs other functions in the place of the `forward` of submodules while eager code calls them.

Where a compiled submodule would have other results than an eager one, the call runs the submodule's own `forward`:

- in a reentrant region of `torch.utils.checkpoint`, which runs without gradients first, and in backward, when nothing
  stands in the place of `forward`; the other kind is that of `recomputed.py`;
- under transforms of `torch.func`, which see into eager operators only;
- while Dynamo traces the call, such as for a branch of `torch.cond`;
- of a copy of a submodule, whose weights are its own.
"""

from __future__ import annotations

import copy
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from thunder_memsave.errors import CaptureError, ThunderMemsaveError, user_frame

FORWARD = "forward"
Run = Callable[..., Any]

_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__
_RUNS = str(Path(__file__).with_name("run_pieces.py"))
"""The file of the function that calls eager code."""


class OnlyEagerError(ThunderMemsaveError, RuntimeError):
    """A submodule is called in a way that only eager code can serve, and has only rows of its weights."""

    code = None  # the traceback shows the user


@contextmanager
def redirected(runs: Mapping[nn.Module, Run], *, apart: str) -> Iterator[None]:
    """Run `runs` in the place of the `forward` of modules.

    While one of them runs, all modules have their own again: what it captures must not see the functions.

    Args:
        runs: By module.
        apart: Why a module's own `forward` has not all of its parameters, as ranks share them; empty if it has.

    Raises:
        CaptureError: a reentrant checkpoint is around a module that has not all of its parameters; from its call.
        OnlyEagerError: a transform is; likewise.
    """
    own = {module: vars(module).get(FORWARD) for module in runs}

    def redirect() -> None:
        for module, stand in stands.items():
            vars(module)[FORWARD] = stand

    def restore() -> None:
        for module, before in own.items():
            if before is None:
                vars(module).pop(FORWARD, None)
            else:
                vars(module)[FORWARD] = before

    stands = {
        module: _Stand(module, own[module], run, redirect, restore, apart)
        for module, run in runs.items()
    }
    redirect()
    try:
        yield
    finally:
        restore()


@dataclass(frozen=True, slots=True, eq=False)
class _Stand:
    """A function that stands in the place of a module's `forward`."""

    module: nn.Module
    own: Run | None
    """A `forward` that the module itself had; None: its class's."""
    run: Run
    redirect: Callable[[], None]
    restore: Callable[[], None]
    apart: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._eager(*args, **kwargs)
        if _in_transform():
            if self.apart:
                raise OnlyEagerError(
                    f"{self._name} is called under a transform of torch.func, which sees no compiled code."
                )
            return self._eager(*args, **kwargs)
        if _in_reentrant_checkpoint():
            if not self.apart:
                return self._eager(*args, **kwargs)
            self._refuse_reentrant()
        self.restore()
        try:
            return self.run(*args, **kwargs)
        finally:
            self.redirect()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the `forward` of the copy of the module."""
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        return types.MethodType(getattr(type(self.module), FORWARD), memo[id(self.module)])

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def _refuse_reentrant(self) -> None:
        """Refuse a region that runs without gradients first: in backward, ranks would have only rows of the weights."""
        if self.module.training:
            raise CaptureError(
                f"torch.utils.checkpoint(use_reentrant=True) is around {self._name} "
                f"(at {user_frame(traceback.extract_stack())}) in code that cannot be captured as one graph, and "
                f"{self.apart}. Pass use_reentrant=False, which PyTorch recommends; or leave the checkpoint out, or "
                "move what cannot be captured out of the compiled method."
            )


def _in_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _in_reentrant_checkpoint() -> bool:
    """Return whether `checkpoint(use_reentrant=True)` is among the callers within the eager code."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _RUNS:
        if frame.f_code is _REENTRANT:
            return True
        frame = frame.f_back
    return False
