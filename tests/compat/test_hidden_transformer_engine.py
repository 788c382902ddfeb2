"""Our import of Thunder does not load TransformerEngine; Thunder's own does, or the file can go."""

from __future__ import annotations

import os
import subprocess
import sys

from harness.te_on_cpu import FOLDER

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
