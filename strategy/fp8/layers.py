"""Which linears of a module run in fp8, and why the others do not."""

from __future__ import annotations
