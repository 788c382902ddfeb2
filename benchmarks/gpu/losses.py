"""Checks losses of a tile's logits in one launch, and their gradients, against float64, and times them.

On a CPU it runs under Triton's interpreter, where Triton is installed and `TRITON_INTERPRET=1` is set. It cuts bfloat16
off where a device rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from statistics import median

import torch
from torch import Tensor

from gpu.checks import Check, Measured, Target, require, require_triton
from gpu.models import synchronized_s
from thunder_memsave.ops.families.tiled_loss import IGNORED, LaunchedTile, LossOptions, Tile
from thunder_memsave.ops.launches import losses as launches

_OPTIONS = {
    "plain": LossOptions(),
    "smoothed": LossOptions(label_smoothing=0.1),
    "with z-loss": LossOptions(z_loss=1e-2),
    "capped": LossOptions(soft_cap=5.0),
    "scaled": LossOptions(logit_scale=0.3),
    "with all": LossOptions(0.1, 1e-2, 5.0, 0.3),
}
_SPECIAL = ("plain", "capped", "scaled")
"""Options for which a row may have classes of no probability."""
_CLASSES = (1, 100, 4096, 9001, 50257)
_ON_CUDA = {torch.bfloat16: ("plain", "capped", "with all"), torch.float16: ("plain",)}
_CLASSES_ON_CUDA = (100, 50257)
"""Fewer: Triton compiles its kernels anew for each number and each set of options, about a second each."""
_ROWS = 7
_TIMED = (4096, 128256)
_MOST = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of one number that is rounded to nearest; where it is cut off, twice that."""


def in_one_launch(target: Target) -> Measured:
    """Compare losses and gradients with float64, and with those of PyTorch's operators in float32."""
    require_triton(target, launches.why_not)
    of_losses, of_gradients = 0.0, 0.0
    for about, logits, targets, options in _cases(target):
        factors = torch.rand(_ROWS, device=target.device) + 0.5
        for each in (factors, factors[0]):
            found = _run(LaunchedTile, logits.clone(), targets, options, each)
            exact = _run(Tile, logits.double(), targets, options, each.double())
            require(bool((found[1][targets == IGNORED] == 0.0).all()), f"{about}: ignored rows")
            of_losses = max(of_losses, _loss_error(about, found[0], exact[0]))
            error = _gradient_error(found[1], exact[1])
            most = _MOST[logits.dtype] * (1 if target.is_cuda else 2)
            require(error <= 1.05 * most, f"{about}: relative error of gradients {error:.1e}")
            of_gradients = max(of_gradients, error)
    _compare_factors(target)
    line = f"errors against float64: losses {of_losses:.1e}, gradients {of_gradients:.1e}"
    times = _times(target) if target.is_cuda else {}
    shown = "".join(f"; {name} {seconds * 1e3:.2f} ms" for name, seconds in times.items())
    return Measured(line=line + shown, numbers=times)


def _cases(target: Target) -> Iterator[tuple[str, Tensor, Tensor, LossOptions]]:
    generator = torch.Generator().manual_seed(0)
    classes = _CLASSES_ON_CUDA if target.is_cuda else _CLASSES
    for dtype, (name, options), num in product(_MOST, _OPTIONS.items(), classes):
        if target.is_cuda and name not in _ON_CUDA[dtype]:
            continue
        logits = (torch.randn(_ROWS, num, generator=generator) * 4).to(dtype)
        targets = torch.randint(0, num, (_ROWS,), generator=generator)
        if name in _SPECIAL and num > 60:
            logits[:, 40:50] = -math.inf
            logits[3, : num * 9 // 10] = -math.inf  # whole blocks of a program
            targets[:] = num - 1 - targets % 5
        targets[2] = IGNORED
        about = f"{dtype}, {num} classes, {name}"
        yield about, logits.to(target.device), targets.to(target.device), options


def _run(
    make: Callable[[Tensor, Tensor, LossOptions], Tile | LaunchedTile],
    logits: Tensor,
    targets: Tensor,
    options: LossOptions,
    factors: Tensor,
) -> tuple[Tensor, Tensor]:
    tile = make(logits, targets, options)
    return tile.losses(), tile.of_logits(factors)


def _loss_error(about: str, found: Tensor, exact: Tensor) -> float:
    error = float((found.double() - exact).abs().max())
    require(error <= 1e-5, f"{about}: losses differ from float64 by {error:.1e}")
    return error


def _gradient_error(found: Tensor, exact: Tensor) -> float:
    size = exact.norm()
    return float((found.double() - exact).norm() / size) if size > 1e-6 else 0.0


def _compare_factors(target: Target) -> None:
    """Compare gradients times a factor with PyTorch's operators, bit by bit on a device."""
    for dtype, num_factors in product(_MOST, (1, _ROWS)):
        value = torch.randn(_ROWS, 9001, device=target.device).to(dtype)
        factors = torch.rand(num_factors, device=target.device) + 0.5
        found = launches.scaled_rows(value, factors)
        exact = value.float() * factors[:, None]
        about = f"{num_factors} factors of {dtype}"
        if target.is_cuda:
            require(torch.equal(found, exact.to(dtype)), f"{about}: other bits than PyTorch's")
        error = ((found.float() - exact) / exact.abs().clamp_min(2.0**-14)).abs().max()
        require(float(error) <= 2 * _MOST[dtype], f"{about}: relative error {error:.1e}")


def _times(target: Target) -> dict[str, float]:
    """Time a tile of 4,096 tokens of Llama 3, in both ways."""
    targets = torch.randint(0, _TIMED[1], _TIMED[:1], device=target.device)
    logits = torch.randn(_TIMED, device=target.device, dtype=torch.bfloat16)
    factors = torch.ones((), device=target.device)
    found = {}
    for name, make in (("one launch each", LaunchedTile), ("PyTorch's operators", Tile)):
        seconds = []
        for _ in range(8):
            start = synchronized_s(target)
            _run(make, logits, targets, LossOptions(), factors)
            seconds.append(synchronized_s(target) - start)
        found[name] = median(seconds[1:])
    return found


CHECKS = [Check(name="losses in one launch", run=in_one_launch, limit_s=90, alone=True)]
