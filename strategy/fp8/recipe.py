"""The fp8 recipes: which dtype and which scaling each tensor of a linear gets."""

from __future__ import annotations
