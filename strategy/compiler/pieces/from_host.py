"""Gives eager code weights that are on the host: copies on the device, for as long as its call takes.

What a backward reads of them stays until then, as in eager PyTorch. Afterwards each is copied back: a write through
`.data`, or to statistics of a batch norm, is seen nowhere but in the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from thunder_memsave.ops.host_copies.weights import copy_here, place_of


@contextmanager
def copied_from_host(module: nn.Module, read: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let a module have copies of the weights that are on the host.

    Args:
        module: The module whose code is eager.
        read: By name, the parameters that the code reads.
    """
    on_host = {id(p): p for p in read.values() if place_of(p) is not None}
    if not on_host:
        yield
        return
    copies = {key: copy_here(p) for key, p in on_host.items()}
    given = {name: copies[id(p)] for name, p in read.items() if id(p) in copies}
    with _reparametrize_module(module, given):
        yield
    with torch.no_grad():
        for key, p in on_host.items():
            p.data.copy_(copies[key])
