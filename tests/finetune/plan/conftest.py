"""What tests of plans share."""

from __future__ import annotations

from typing import Any

import pytest

from thunder_memsave.compiler.compile_call import CallCompiler, Compiled
from thunder_memsave.finetune.plan import plan_run


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """All that is compiled during the test."""
    seen: list[Compiled] = []
    compile_call = CallCompiler.compile

    def compile_and_see(self: CallCompiler, *args: Any, **kwargs: Any) -> Compiled:
        seen.append(compile_call(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(CallCompiler, "compile", compile_and_see)
    monkeypatch.setattr(plan_run, "_SMALLEST_S", 0.01)
    return seen
