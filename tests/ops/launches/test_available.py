"""Where Triton is missing, one line of the log says what runs instead, and what that costs."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest

from thunder_memsave.fp8.kernels import one_launch
from thunder_memsave.ops.launches import losses

SAID = {
    one_launch.why_not: (
        "Triton is not installed: fp8's torch backend casts in chunks of 4 Mi elements with 9 launches each, which "
        "takes longer than one kernel; install `triton` and a C compiler."
    ),
    losses.why_not: (
        "Triton is not installed: losses copy their logits to float32 and go through them five times, which takes "
        "longer than one kernel; install `triton` and a C compiler."
    ),
}


@pytest.mark.parametrize("why_not", SAID, ids=["fp8", "losses"])
def test_that_triton_is_missing_is_said_once(
    why_not: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why_not.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert why_not() == why_not() == "Triton is not installed"
    finally:
        why_not.cache_clear()
    assert caplog.messages == [SAID[why_not]]
