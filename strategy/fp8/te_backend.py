"""The fp8 operations of a linear on plain tensors, by TransformerEngine's kernels."""

from __future__ import annotations
