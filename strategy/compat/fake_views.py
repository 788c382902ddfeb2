"""PyTorch gives a view without numbers other strides for dims of one element than a view of real memory.

`FakeTensorMode` answers `view` in Python (torch/_refs, `_reshape_view_helper`), which starts such a dim from the shape
before; the kernel's rule (ATen/TensorUtils.cpp, `computeStride`) starts it from the numbers after it:

    image.permute(0, 3, 1, 2).view(1, 16, 8, 8).stride()        # eager: (16, 1, 128, 16), fake: (1024, 1, 128, 16)

Convolutions and pools choose the layout of their results by these strides. A plan then counts memory that the step does
not take, and a later `view` that eager runs is refused. Shapes without symbols are given to the kernel's own rule here.

Delete this file when `tests/compat/test_fake_views.py` says that both give the same strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

_rules = {
    view: fake_impls.op_implementations_dict[view]
    for view in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    if view in fake_impls.op_implementations_dict
}


def apply() -> None:
    """Let the kernel's rule give the strides."""
    fake_impls.op_implementations_dict.update(dict.fromkeys(_rules, _view))
    FakeTensorMode.cache_clear()


def remove() -> None:
    """Give PyTorch its own rule back."""
    fake_impls.op_implementations_dict.update(_rules)
    FakeTensorMode.cache_clear()


def _view(mode: FakeTensorMode, view: Any, source: FakeTensor, *shape: Any, **options: Any) -> Any:
    sizes = (*source.size(), *source.stride(), source.storage_offset(), *shape[0])
    if options or not all(type(size) is int for size in sizes):
        return _rules[view](mode, view, source, *shape, **options)
    # Without Dynamo's dispatcher, which would go back to the rule in Python.
    with in_kernel_invocation_manager(mode), torch._C._DisablePythonDispatcher():
        result = view(source, *shape)
    return FakeTensor(mode, result, source.fake_device)
