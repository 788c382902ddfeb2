"""torch 2.13 removed named tensors; thunder 0.2.6 looks their methods up by name when it is imported."""

import torch

_METHODS = "align_as align_to has_names refine_names rename rename_ names".split()


def apply() -> None:
    """Give `torch.Tensor` stubs for the removed methods, so that thunder can be imported."""
    for name in _METHODS:
        if not hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, _stub(name))


def _stub(name):
    def removed(self, *args, **kwargs):
        raise NotImplementedError("named tensors were removed from torch 2.13")

    removed.__name__ = name
    removed.__module__ = "torch"
    removed.__qualname__ = f"Tensor.{name}"
    return removed
