"""The runner of Lightning's own tests reports whether it ran them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.fabric import finish, start_python

RUNNER = Path(__file__).with_name("run_lightning_tests.py")


def test_without_a_checkout_it_says_that_it_did_not_run() -> None:
    process = start_python([RUNNER], LIGHTNING_CHECKOUT="nowhere")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "NOT RUN: LIGHTNING_CHECKOUT is 'nowhere', which is no checkout" in output


@pytest.mark.slow
@pytest.mark.skipif("LIGHTNING_CHECKOUT" not in os.environ, reason="needs LIGHTNING_CHECKOUT")
def test_lightnings_own_clipping_tests_pass() -> None:
    assert "4 of 4 of Lightning's tests passed" in finish(start_python([RUNNER]), timeout=600)
