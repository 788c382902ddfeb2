"""Compiles a graph of operators with TorchInductor, of PyTorch 2.11 to 2.15; nothing else of ours knows of it.

Inductor keeps what it compiled on disk (`TORCHINDUCTOR_CACHE_DIR`), by the graph, layouts, versions, device and
options; it writes files beside and renames them.
"""

from __future__ import annotations

import logging
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, fx

_log = logging.getLogger(__name__)

_OPTIONS = {
    # Round to bfloat16 where the operators would: else a region keeps float32 inside.
    "emulate_precision_casts": True,
    # Quotients as IEEE 754 rounds them: Triton's own are approximate.
    "eager_numerics.division_rounding": True,
    # One kernel after the other, as nothing of the program would gain from a choice by time.
    "max_autotune": False,
    "max_autotune_pointwise": False,
    # Trying sizes of blocks on a GPU takes memory that no plan counts.
    "triton.autotune_pointwise": False,
    # What graphs replay into is memory of a pool, which the next replay writes over.
    "triton.cudagraphs": False,
    # What runs tells by them that an operand is laid out otherwise.
    "size_asserts": True,
    # No worker processes and threads beside a training: a region has one or two kernels.
    "compile_threads": 1,
}

_MOST_OBJECTS = 20_000
_SLICES = "slices 1"
"""How graphs for a CPU are written before they are compiled; see `slices.py`."""

Kernel = Callable[..., Sequence[Tensor]]
Generated = Callable[[list[Tensor]], Sequence[Tensor]]
"""Empties the list of operands; raises AssertionError where they are not laid out as it was compiled for."""


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Kernel:
    """Compile a graph for the layouts of its inputs.

    Args:
        graph: Pure, of ATen operators; returns a list of tensors. Made inside `options()`.
        inputs: (Fake) tensors with the layouts that it will get.

    Raises:
        Exception: what inductor raises where it cannot.
    """
    with options(), warnings.catch_warnings():
        # Of inductor to its authors; a user's filter may make errors of them.
        warnings.simplefilter("ignore")
        from torch._inductor import standalone_compile  # takes seconds to import

        return standalone_compile(graph, list(inputs), dynamic_shapes="from_example_inputs")


def direct(kernel: Kernel) -> Generated:
    """Return the code that inductor generated for a compiled graph; the kernel, which takes longer, if not found.

    Around it are layers for graphs with views, writes and gradients, which this one has not: on a GPU's host they take
    as long as the launch.
    """
    from torch._inductor.output_code import CompiledFxGraph

    seen: set[int] = set()
    waiting: deque[Any] = deque([kernel])
    while waiting and len(seen) < _MOST_OBJECTS:
        each = waiting.popleft()
        if isinstance(each, CompiledFxGraph):
            return each.current_callable or partial(_run, kernel)
        if id(each) not in seen:
            seen.add(id(each))
            waiting += _within(each)
    return partial(_run, kernel)


def _run(kernel: Kernel, args: list[Tensor]) -> Sequence[Tensor]:
    return kernel(*args)


def _within(found: Any) -> list[Any]:
    """Return what a function or an object of inductor's holds."""
    if isinstance(found, types.FunctionType):
        cells = found.__closure__ or ()
        return [*(c for cell in cells for c in _contents(cell)), *vars(found).values()]
    if isinstance(found, types.MethodType):
        return [found.__self__, found.__func__]
    if isinstance(found, partial):
        return [found.func, *found.args, *found.keywords.values()]
    if isinstance(found, (list, tuple)):
        return list(found)
    is_of_torch = type(found).__module__.startswith(("torch._inductor", "torch._functorch"))
    return list(getattr(found, "__dict__", {}).values()) if is_of_torch else []


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return `a * b + c`, which inductor's code rounds once."""
    from torch._inductor import inductor_prims

    return inductor_prims.fma(a, b, c)  # type: ignore[no-any-return]


@contextmanager
def options() -> Iterator[None]:
    """Trace and compile with options that keep the bits of the single operators."""
    from torch._inductor import config

    with config.patch(_OPTIONS):
        yield


@cache
def why_unavailable(device_type: str) -> str | None:
    """Return why inductor cannot compile for a type of device here, in one line; None: it can."""
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton, which makes a GPU's kernels, does not work here"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # its own type moved between versions
        return f"there is no C++ compiler ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


@cache
def keeps_rounding(device_type: str) -> bool:
    """Return whether `emulate_precision_casts` does: on a CPU, PyTorch 2.11 drops a cast and the one back.

    2.12 was not tried, and is taken to do so too.
    """
    return device_type != "cpu" or Version(torch.__version__).release >= (2, 13)


@cache
def rounds_factors() -> bool:
    """Return whether a number that a tensor of 16 bits is multiplied or divided by is rounded to them, as 2.15 does.

    2.14 was not tried, and is taken to do so too.
    """
    return Version(torch.__version__).release >= (2, 14)


def describe() -> str:
    """Describe what decides, beside the graph, which kernel is made."""
    return f"torch {torch.__version__} {sorted(_OPTIONS.items())} {_SLICES}"


@cache
def warn_unavailable(reason: str) -> None:
    """Log, once for each reason, that the step is not fused."""
    _log.warning(
        "fusion is on, but %s: the step runs unfused, with the same bits and memory.", reason
    )
