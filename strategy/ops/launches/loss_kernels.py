"""Triton kernels of a cross-entropy: terms of a row's softmax, gradients of its logits in their place, and factors.

A logit `x` stands for `y = x * SCALE`, or `CAP * tanh(x * SCALE / CAP)` where `CAP` is not 0. All is computed in
float32. `losses.py` launches the kernels; importing this module imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent, to an absolute error of 1e-7."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def softmax_terms_kernel(
    logits,
    largest,
    logarithms,
    totals,
    NUM_CLASSES: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce a row of contiguous (rows, `NUM_CLASSES`) logits in each program.

    In `largest` it leaves the largest number, in `logarithms` the logarithm of the sum of exponentials of numbers less
    that, and, with `ADDS`, in `totals` the sum of the numbers.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * NUM_CLASSES
    places = tl.arange(0, BLOCK)
    most = float("-inf")
    exponentials = 0.0
    total = 0.0
    for start in range(0, NUM_CLASSES, BLOCK):
        is_class = start + places < NUM_CLASSES
        y = tl.load(logits + start + places, mask=is_class, other=0.0).to(tl.float32) * SCALE
        if CAP != 0.0:
            y = CAP * _tanh(y / CAP)
        if ADDS:
            total += tl.sum(tl.where(is_class, y, 0.0))
        y = tl.where(is_class, y, float("-inf"))
        raised = tl.maximum(most, tl.max(y))
        base = tl.where(raised == float("-inf"), 0.0, raised)  # -inf alone so far
        exponentials = exponentials * tl.exp(most - base) + tl.sum(tl.exp(y - base))
        most = raised
    tl.store(largest + row, most)
    tl.store(logarithms + row, tl.log(exponentials))
    if ADDS:
        tl.store(totals + row, total)


@triton.jit
def gradients_kernel(
    logits,
    targets,
    factors,
    factors_stride,
    largest,
    logarithms,
    NUM_CLASSES: tl.constexpr,
    IGNORED: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write gradients over `BLOCK` logits of a row in each program; `softmax_terms_kernel` left the row's terms.

    The gradient of a target of plain cross-entropy, of a probability, is rounded once: `p * factor - factor`.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * NUM_CLASSES
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_class = places < NUM_CLASSES
    target = tl.load(targets + row)
    factor = tl.load(factors + row * factors_stride)
    factor = tl.where(target == IGNORED, 0.0, factor)
    most = tl.load(largest + row)
    logarithm = tl.load(logarithms + row)
    y = tl.load(logits + places, mask=is_class, other=0.0).to(tl.float32) * SCALE
    if CAP != 0.0:
        tanh = _tanh(y / CAP)
        y = CAP * tanh
    p = tl.exp(y - most - logarithm)
    scaled = factor
    if Z_LOSS != 0.0:
        scaled *= 1.0 + 2.0 * Z_LOSS * (most + logarithm)
    gradient = p * scaled
    at_target = tl.fma(p, scaled, -factor * (1.0 - SMOOTHING))
    gradient = tl.where(places == target, at_target, gradient)
    if SMOOTHING != 0.0:
        gradient -= factor * (SMOOTHING / NUM_CLASSES)
    if CAP != 0.0:
        gradient *= 1.0 - tanh * tanh
    gradient *= SCALE
    tl.store(logits + places, gradient.to(logits.dtype.element_ty), mask=is_class)


@triton.jit
def scale_rows_kernel(
    values,
    factors,
    results,
    num_columns,
    BLOCKS_OF_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write `BLOCK` products of a row of contiguous (rows, `num_columns`) values and its factor in each program."""
    program = tl.program_id(0).to(tl.int64)
    row = program // BLOCKS_OF_ROW
    places = program % BLOCKS_OF_ROW * BLOCK + tl.arange(0, BLOCK)
    is_column = places < num_columns
    factor = tl.load(factors + row)
    value = tl.load(values + row * num_columns + places, mask=is_column, other=0.0)
    result = (value.to(tl.float32) * factor).to(results.dtype.element_ty)
    tl.store(results + row * num_columns + places, result, mask=is_column)
