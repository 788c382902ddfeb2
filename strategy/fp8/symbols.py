"""Thunder's operators for a linear in fp8, and their gradients."""

from __future__ import annotations
