"""A capture logs no error; without the work-around an older torch still does."""

from __future__ import annotations

import subprocess
import sys

from thunder_memsave.compat import dynamo_compile_metrics

ASK = """
import logging, torch._dynamo.utils as utils, torch._dynamo.config as config
with config.patch(ignore_logging_functions={logging.Logger.info, logging.Logger.debug}):
    utils._get_dynamo_config_for_logging()
"""


def error_of(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_canary_torch_fails_exactly_where_the_guard_says() -> None:
    fails = "'<' not supported between instances of 'function'" in error_of(ASK)
    assert fails == dynamo_compile_metrics.is_needed()


def test_the_settings_are_logged_or_left_out_without_an_error() -> None:
    assert error_of(f"from thunder_memsave import compat; compat.apply()\n{ASK}") == ""
