"""The state of delayed scaling: for each linear, the amax of its tensors in the last steps and their scales."""

from __future__ import annotations
