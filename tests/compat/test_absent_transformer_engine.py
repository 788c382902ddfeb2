"""Our import of Thunder is silent; Thunder's own is not yet, or the file can go."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from thunder_memsave.compat import absent_transformer_engine

ABSENT = importlib.util.find_spec("transformer_engine") is None
IMPORT = "from thunder_memsave.compat import removed_names\nwith removed_names():"


def import_errors(script: str) -> str:
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(not ABSENT, reason="TransformerEngine is installed: Thunder has no complaint")
def test_canary_thunder_still_warns() -> None:
    assert absent_transformer_engine.MESSAGE in import_errors(f"{IMPORT} import thunder"), (
        "Thunder no longer warns about an absent TransformerEngine: delete "
        "strategy/compat/absent_transformer_engine.py."
    )


def test_our_import_of_thunder_warns_about_nothing() -> None:
    assert import_errors("from thunder_memsave import compat; compat.apply()") == ""
