"""Asks a device whether formulas, compiled, have the bits of PyTorch's own kernels there, before any of them fuses.

Answers are kept on disk, for one processor or GPU, number of threads, PyTorch, options of inductor and code of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_memsave.fusion import functions, inductor
from thunder_memsave.measure.disk_table import DiskTable
from thunder_memsave.measure.run_alone import digest_of, environment
from thunder_memsave.ops.cuda_device import is_here

_log = logging.getLogger(__name__)

_NUM = 2**16
"""Numbers of a comparison: all of 16 bits. They take 256 KiB, which come from small segments of the device's memory."""
_ROUNDS = 8
_SPECIAL = (0.0, -0.0, 1.0, float("inf"), -float("inf"), 1e-45, 1e-30, 3.4e38)
_WORDS = {True: "has the same bits", False: "has other bits"}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_same_bits(operator: OpOverload, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a function's formula has the bits of PyTorch's kernel on a device, for a dtype and float32.

    All numbers of 16 bits are compared, and 1,048,576 of float32: half of them of any size, half near zero. A device
    that is planned for and not here is taken to say yes, as an H200 does.
    """
    if device.type == "cuda" and not is_here():
        return True
    if device.type == "cpu" and inductor.why_unavailable("cpu") is not None:
        return True  # what is planned here runs elsewhere
    return _is_compared(operator, dtype, device)


@cache
def _is_compared(operator: OpOverload, dtype: torch.dtype, device: torch.device) -> bool:
    answers = DiskTable("same_bits", f"{environment()}, {inductor.describe()}, {_code()}")
    # The answer is a part of the key, so that a byte of the file that flips makes none that is wrong.
    keys = {same: f"{operator} {dtype} {device.type} {word}" for same, word in _WORDS.items()}
    known = [same for same, key in keys.items() if answers.get(key) == 1.0]
    found = known[0] if len(known) == 1 else _answer(operator, dtype, device)
    if found is None:
        return False
    if not known:
        answers.put(keys[found], 1.0)
        answers.save()
    if not found:
        _log.info("%s is not fused on %s: inductor's code has other bits", operator, device)
    return found


@cache
def _code() -> str:
    """Return a digest of the formulas and of how they are compared."""
    files = (functions.__file__, inductor.__file__, __file__)
    return digest_of(Path(str(file)) for file in files)


def _answer(operator: OpOverload, dtype: torch.dtype, device: torch.device) -> bool | None:
    """Compare; None: it could not be compared, which is logged."""
    try:
        return all(_is_same(operator, each, device) for each in {torch.float32, dtype})
    except Exception as error:  # of any type, a compiler's own among them
        _log.warning(
            "%s is not fused on %s, which takes longer: comparing its bits raised %s: %s",
            operator,
            device,
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return None


def _is_same(operator: OpOverload, dtype: torch.dtype, device: torch.device) -> bool:
    with unset_fake_temporarily(), torch.no_grad(), torch.device(device):
        return all(_is_call_same(call, num, dtype) for call, num in functions.calls(operator))


def _is_call_same(call: Callable[..., Tensor], num: int, dtype: torch.dtype) -> bool:
    kernel: inductor.Kernel | None = None
    for operands in _operands(dtype, num):
        kernel = kernel or compiled(call, operands)
        ours, theirs = kernel(*operands)[0], call(*operands)
        if num_different(ours, theirs):
            return False
    return True


def num_different(ours: Tensor, theirs: Tensor) -> int:
    """Return how many numbers have other bits, those that are none in both left out."""
    integers = _INTEGERS[ours.dtype.itemsize]
    bits = (each.contiguous().view(integers) for each in (ours, theirs))
    return int((torch.ne(*bits) & ~(ours.isnan() & theirs.isnan())).sum())


def compiled(call: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> inductor.Kernel:
    """Compile a call that has a formula for the layouts of its operands."""
    device_type = operands[0].device.type
    with inductor.options():
        traced = make_fx(
            lambda *args: [call(*args)],
            decomposition_table=functions.formulas(device_type),
            tracing_mode="fake",
        )
        graph = traced(*operands)
    return inductor.compile_graph(graph, operands)


def _operands(dtype: torch.dtype, num: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield operands: every number of 16 bits as the last one; for float32 any bits, and numbers near zero."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    for number in range(_ROUNDS):
        bits = torch.randint(-(2**31), 2**31, (num, _NUM), generator=generator)
        near = torch.randn((num, _NUM), generator=generator) * 4
        near[:, : len(_SPECIAL)] = torch.tensor(_SPECIAL).roll(number)
        if dtype == torch.float32:
            yield tuple(bits.to(torch.int32).view(torch.float32))
            yield tuple(near)
            continue
        last = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        others = near.to(dtype) if number % 2 else bits.to(torch.int16).view(dtype)
        yield (*others[1:], last)
