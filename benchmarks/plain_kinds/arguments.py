"""What forward takes and returns: dictionaries, tuples, dataclasses, names, None."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plain_kinds.control_flow import Two
from plain_kinds.registry import always, data, floats, ints, plain, several

ROWS, WIDTH = 4, 6


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    hidden: Tensor | None = None


@plain(x=floats(ROWS, WIDTH), labels=ints(3, ROWS))
class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None, *, hidden: bool = False) -> Output:
        logits = self.linear(x)
        return Output(F.cross_entropy(logits, labels), logits, x if hidden else None)


class Pair(NamedTuple):
    mean: Tensor
    std: Tensor


Triple = namedtuple("Triple", "a b c")


@plain(x=floats(ROWS, WIDTH))
class NamedTupleOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        mean, log_std = self.linear(x).chunk(2, -1)
        return {"pair": Pair(mean, log_std.exp()), "triple": Triple(mean.sum(), None, 3)}


@plain(
    args=several(floats(ROWS, WIDTH), floats(ROWS, WIDTH)), scale=always(0.5), mode=always("sum")
)
class PositionsAndNames(Two):
    """*args, keyword-only arguments with defaults, a string and a number."""

    def forward(
        self, *args: Tensor, scale: float, mode: str = "mean", bias: Tensor | None = None
    ) -> Tensor:
        h = torch.stack([self.first(a) for a in args])
        h = getattr(h, mode)(0) * scale
        return h if bias is None else h + bias


@plain(batch=lambda g: {"image": torch.randn(2, WIDTH, generator=g), "sizes": [1, 2], "name": "b"})
class DictionaryInput(Two):
    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        h = self.first(batch["image"])
        return {f"part {n}": h[: int(n)] for n in batch["sizes"]}


@plain(x=several(floats(2, WIDTH), floats(3, WIDTH), data(1, WIDTH)))
class ListOfTensors(Two):
    """Inputs of several lengths are padded together."""

    def forward(self, x: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        padded = nn.utils.rnn.pad_sequence(list(x), batch_first=True)
        return self.first(padded), [self.second(part) for part in x]
