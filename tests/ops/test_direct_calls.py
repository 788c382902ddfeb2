"""Each of PyTorch's functions that runs in the place of an ATen operator runs that operator, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thunder_memsave.ops.direct_calls import DIRECT

A = torch.linspace(0.1, 0.9, 24).reshape(4, 6)
B = torch.linspace(0.8, 0.2, 24).reshape(4, 6)
SQUARE = A @ B.mT
ROWS = torch.tensor(
    [[0, 2, 1, 3, 1, 0], [3, 1, 0, 2, 2, 1], [0, 0, 1, 1, 2, 2], [3, 3, 2, 1, 0, 0]]
)
BATCH = torch.stack([SQUARE, SQUARE.mT])
IMAGE = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
FLAGS = A > 0.5
INDEX = torch.tensor([0, 2])

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "where.self": (FLAGS, A, B),
    "mm.default": (A, B.mT),
    "bmm.default": (BATCH, BATCH),
    "addmm.default": (SQUARE, A, B.mT),
    "baddbmm.default": (BATCH, BATCH, BATCH),
    "addbmm.default": (SQUARE, BATCH, BATCH),
    "permute.default": (BATCH, [2, 0, 1]),
    "view.default": (A, [2, -1, 6]),
    "unsqueeze.default": (A, 1),
    "cat.default": ([A, B], 1),
    "stack.default": ([A, B], 1),
    "embedding.default": (A, ROWS % 4, -1, False, False),
    "gather.default": (A, 0, ROWS),
    "scatter_add.default": (A, 0, ROWS, B),
    "scatter.src": (A, 0, ROWS, B),
    "scatter.value": (A, 0, ROWS, 0.5),
    "index_select.default": (A, 0, INDEX),
    "index_add.default": (A, 0, INDEX, B[:2]),
    "index_copy.default": (A, 0, INDEX, B[:2]),
    "cumsum.default": (A, 1),
    "logical_and.default": (FLAGS, ~FLAGS),
    "logical_or.default": (FLAGS, ~FLAGS),
    "logical_not.default": (FLAGS,),
    "bitwise_not.default": (ROWS,),
    "bitwise_and.Tensor": (ROWS, ROWS + 1),
    "bitwise_or.Tensor": (ROWS, ROWS + 1),
    "bitwise_xor.Tensor": (ROWS, ROWS + 1),
    "amax.default": (A, [1], True),
    "amin.default": (A, [1], True),
    "argmax.default": (A, 1),
    "_softmax.default": (A, 1, False),
    "_log_softmax.default": (A, 1, False),
    "native_layer_norm.default": (A, [6], B[0], B[1], 1e-5),
    "convolution.default": (
        IMAGE,
        IMAGE[:, :, :3, :3].contiguous(),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    ),
    "constant_pad_nd.default": (A, [0, 1], 0.5),
    "sum.dim_IntList": (A, [0], True),
    "mean.dim": (A, [0], True),
    "flip.default": (A, [1]),
    "roll.default": (A, [1], [1]),
    "full_like.default": (A, 0.5),
    "native_dropout.default": (A, 0.5, True),
    "masked_scatter.default": (A, FLAGS, B),
    "masked_fill.Scalar": (A, FLAGS, 0.5),
    "addcmul.default": (A, B, A),
    "addcdiv.default": (A, B, A),
    "select_scatter.default": (A, B[0], 0, 1),
    "slice_scatter.default": (A, B[:2], 0, 1, 3),
    "topk.default": (A, 2, 1),
    "outer.default": (A[0], B[0]),
    "dot.default": (A[0], B[0]),
    "mv.default": (A, B[0]),
    "select.int": (A, 1, 2),
    "transpose.int": (BATCH, 0, 2),
    "squeeze.dim": (A[:1], 0),
    "squeeze.dims": (A[:1], [0]),
    "max.dim": (A, 1, True),
    "min.dim": (A, 1, True),
    "sort.default": (A, 1),
    "pow.Tensor_Scalar": (A, 3.0),
    "pow.Tensor_Tensor": (A, B),
    "expand.default": (A[:1], [4, 6]),
    "avg_pool2d.default": (IMAGE, [2, 2], [2, 2]),
    "upsample_nearest2d.default": (IMAGE, [12, 12], 2.0, 2.0),
    "clamp_min.Tensor": (A, B),
    "clamp_max.Tensor": (A, B),
}
_KWARGS: dict[str, dict[str, Any]] = {"div.Tensor_mode": {"rounding_mode": "floor"}}
_ONE_TENSOR = "neg exp log sqrt rsqrt reciprocal abs sin cos tanh sigmoid relu erf sign floor ceil round isnan isinf"
_ONE_TENSOR += " log1p expm1 square t clone detach sum mean tril triu zeros_like ones_like gelu silu elu leaky_relu"
_ONE_TENSOR += " softplus hardtanh hardswish hardsigmoid"


def _arguments(name: str) -> tuple[Any, ...]:
    if name in _ARGUMENTS:
        return _ARGUMENTS[name]
    operator, overload = name.split(".")
    if overload == "Scalar":
        return (A, 0.5)
    if overload.startswith("Tensor") or operator in ("maximum", "minimum"):
        return (A, B)
    assert operator in _ONE_TENSOR.split(), name
    return (A,)


class _Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def _run(function: Any, name: str) -> tuple[Any, list[OpOverload]]:
    torch.manual_seed(0)
    with torch.no_grad(), _Called() as called:
        results = function(*_arguments(name), **_KWARGS.get(name, {}))
    return results, called.operators


@pytest.mark.parametrize("operator", DIRECT, ids=lambda o: str(o).removeprefix("aten."))
def test_the_function_runs_the_operator(operator: OpOverload) -> None:
    name = str(operator).removeprefix("aten.")
    found, called = _run(DIRECT[operator], name)
    expected, itself = _run(operator, name)
    assert called == itself
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_number_in_the_place_of_a_tensor() -> None:
    """PyTorch's graphs have `add.Tensor(value, 2)`."""
    for name in ("add", "sub", "mul", "div"):
        operator = getattr(torch.ops.aten, name).Tensor
        assert torch.equal(DIRECT[operator](A, 3), operator(A, 3))
        assert torch.equal(DIRECT[operator](ROWS, 3), operator(ROWS, 3))
