"""Captures do not time their guards; those of Dynamo itself still do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import guards

from thunder_memsave.compiler.compiled_module import CompiledModule

TIMED = "Dynamo no longer times guards: delete the work-around"


def test_only_dynamos_own_captures_time_their_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(guards, "profile_guard_manager"), TIMED
    timed: list[Any] = []
    time = guards.profile_guard_manager

    def time_and_see(*given: Any) -> float:
        timed.append(given)
        return time(*given)

    monkeypatch.setattr(guards, "profile_guard_manager", time_and_see)
    CompiledModule(nn.Linear(3, 4))(torch.ones(2, 3))
    assert not timed
    torch.compile(nn.Linear(5, 4), backend="eager")(torch.ones(2, 5))
    assert len(timed) == 1, TIMED
