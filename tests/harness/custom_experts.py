"""Skips tests of transformers' own operator for experts, which it runs in float32, where PyTorch cannot trace it."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the operators)


def skip_if_untraceable() -> None:
    """Skip the test with transformers 5.17, whose derivative loops over numbers: torch.compile refuses it too."""
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        pytest.skip("this transformers' grouped product has a derivative that PyTorch cannot trace")
