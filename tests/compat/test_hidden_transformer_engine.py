"""Our import of Thunder does not load TransformerEngine; Thunder's own does, or the file can go."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from harness.te_on_cpu import FOLDER
from thunder_memsave.compat.hidden_transformer_engine import MESSAGE

ABSENT = importlib.util.find_spec("transformer_engine") is None
IMPORT = "from thunder_memsave.compat import removed_names\nwith removed_names():"


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds TransformerEngine's Python package without its extension."""
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_canary_thunder_cannot_be_imported_with_half_of_transformer_engine() -> None:
    assert (
        "Found empty `transformer-engine` meta package" in run(f"{IMPORT} import thunder").stderr
    ), (
        "Thunder no longer loads TransformerEngine when it is imported: delete "
        "strategy/compat/hidden_transformer_engine.py."
    )


def test_our_import_of_thunder_leaves_transformer_engine_alone() -> None:
    result = run(
        "from thunder_memsave import compat; compat.apply()\n"
        "import sys; print([m for m in sys.modules if m.startswith('transformer_engine')])\n"
        # Else the first printed trace would import it, and ask once more.
        "print('thunder.executors.transformer_engine_v1ex' in sys.modules)"
    )
    assert result.stderr == ""
    assert result.stdout == "[]\nTrue\n"


@pytest.mark.skipif(not ABSENT, reason="TransformerEngine is installed: Thunder has no complaint")
def test_canary_thunder_still_warns_about_an_absent_one() -> None:
    assert MESSAGE in import_errors(f"{IMPORT} import thunder"), (
        "Thunder no longer warns about an absent TransformerEngine: do not suppress that in "
        "strategy/compat/hidden_transformer_engine.py."
    )


def test_our_import_of_thunder_warns_about_nothing() -> None:
    assert import_errors("from thunder_memsave import compat; compat.apply()") == ""


def import_errors(script: str) -> str:
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr
