"""Compares a compiled module with an eager twin: outputs, gradients (None included), buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig


class Twins:
    """A compiled module and a deep copy of it that stays eager."""

    def __init__(
        self,
        model: nn.Module,
        *,
        planner: MemoryPlanner | None = None,
        config: CompileConfig | None = None,
    ) -> None:
        self.model = model
        self.eager = copy.deepcopy(model)
        self.compiled = CompiledModule(model, planner=planner, config=config)

    def change(self, change: Callable[[Any], object]) -> None:
        """Apply the same change to both."""
        change(self.model)
        change(self.eager)

    @property
    def num_captures(self) -> int:
        return len(self.compiled.captures)

    def assert_equal(
        self,
        *args: Any,
        loss: Callable[[Any], Tensor] | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-6,
        **kwargs: Any,
    ) -> Any:
        """Call both and compare the outputs; with `loss`, also the gradients after its backward."""
        ours, theirs = self.compiled(*args, **kwargs), self.eager(*args, **kwargs)
        assert type(ours) is type(theirs)
        assert_trees_close(ours, theirs, rtol=rtol, atol=atol)
        if loss is not None:
            for model, output in ((self.model, ours), (self.eager, theirs)):
                model.zero_grad()
                loss(output).backward()
            self.assert_gradients_equal(rtol=rtol, atol=atol)
        for (name, b), (_, e) in zip(
            self.model.named_buffers(), self.eager.named_buffers(), strict=True
        ):
            torch.testing.assert_close(b, e, rtol=rtol, atol=atol, msg=f"buffer {name}")
        return ours

    def assert_gradients_equal(self, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        pairs = zip(self.model.named_parameters(), self.eager.parameters(), strict=True)
        for (name, p), e in pairs:
            assert (p.grad is None) == (e.grad is None), f"{name}: {p.grad} against {e.grad}"
            if p.grad is not None:
                torch.testing.assert_close(
                    p.grad,
                    e.grad,
                    rtol=rtol,
                    atol=atol,
                    msg=f"gradient of {name}: {p.grad} against {e.grad}",
                )


def assert_trees_close(ours: Any, theirs: Any, *, rtol: float, atol: float) -> None:
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
            assert a.requires_grad == b.requires_grad
        else:
            assert a == b


def weighted_sum(output: Tensor) -> Tensor:
    """Return a loss whose gradient differs per element."""
    return (output.float() * torch.linspace(0.5, 1.5, output.numel()).view(output.shape)).sum()
