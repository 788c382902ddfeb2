"""Lets weights as small as those of tests stay on the host, and trains a model with some of them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from harness import models
from harness.fabric import make_fabric
from thunder_memsave.budget.offload import streamed
from thunder_memsave.materialize import host_weights
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.strategy import ThunderMemsaveStrategy


@contextmanager
def small_host_weights() -> Iterator[None]:
    """Let weights from 1 KiB on stay on the host."""
    with (
        patch.object(host_weights, "LEAST_BYTES", 1024),
        patch.object(streamed, "LEAST_BYTES", 1024),
    ):
        yield


class HostWeightsRun:
    """A Llama of which the norms alone are trained, and its steps."""

    def __init__(
        self,
        memory: dict[str, Any],
        *,
        num_layers: int = 4,
        change: Callable[[Any], object] = lambda module: None,
        **arguments: Any,
    ) -> None:
        self.fabric = make_fabric(memory=memory, **{"sharding": "none", **arguments})
        torch.manual_seed(0)
        self.net: Any = models.llama(num_layers)
        for name, p in self.net.named_parameters():
            p.requires_grad_("norm" in name)
        change(self.net)
        self.trained = [p for p in self.net.parameters() if p.requires_grad]
        made = torch.optim.SGD(self.trained, lr=0.1)
        self.model, self.optimizer = self.fabric.setup(self.net, made)
        self.ids = models.token_batch(2, 32, seed=1 + self.fabric.global_rank)

    def loss(self) -> Tensor:
        return self.model(input_ids=self.ids, labels=self.ids).loss

    def steps(self, count: int = 2) -> HostWeightsRun:
        for _ in range(count):
            self.fabric.backward(self.loss())
            self.gradients = [p.grad.clone() for p in self.trained if p.grad is not None]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def strategy(self) -> ThunderMemsaveStrategy:
        assert isinstance(self.fabric.strategy, ThunderMemsaveStrategy)
        return self.fabric.strategy

    @property
    def peak_bytes(self) -> int:
        assert self.strategy.plan is not None
        return self.strategy.plan.predicted_peak_bytes

    @property
    def on_host(self) -> list[str]:
        return [n for n, p in self.net.named_parameters() if place_of(p) is not None]

    def same_as(self, other: HostWeightsRun) -> bool:
        pairs = zip(
            [*self.gradients, *self.net.parameters()],
            [*other.gradients, *other.net.parameters()],
            strict=True,
        )
        return all(torch.equal(a.data, b.data) for a, b in pairs)
