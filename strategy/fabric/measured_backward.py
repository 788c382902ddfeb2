"""Fabric's hook around backward: a step that runs in pieces under a budget is measured in it."""

from __future__ import annotations

import functools
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor, nn
from typing_extensions import override

from thunder_memsave.fabric.forward_module import ForwardModule


class MeasuredBackward(Strategy):
    """A strategy's `backward`."""

    _modules: Collection[ForwardModule]

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward, and measure it where a module runs in pieces under a budget.

        Raises:
            BudgetError: eager code and the pieces, which keep little, exceed the budget.
        """
        with ExitStack() as measured:
            for forward in sorted(self._modules, key=lambda m: m.number):
                measured.enter_context(forward.backward_of_pieces(tensor))
            super().backward(tensor, module, *args, **kwargs)

    # Fabric refuses `loss.backward()` of strategies with a `backward` of their own, and looks at what it wraps.
    functools.update_wrapper(backward, Strategy.backward, assigned=(), updated=())
