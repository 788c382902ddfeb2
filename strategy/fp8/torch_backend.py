"""The fp8 operations of a linear on plain tensors, by PyTorch: quantise, transpose, multiply."""

from __future__ import annotations
