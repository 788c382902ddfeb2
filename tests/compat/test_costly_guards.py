"""Captures do not time their guards, and shorten each path once; Dynamo itself still does otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import guards
from torch.utils import _traceback

from thunder_memsave.compiler.compiled_module import CompiledModule

MENDED = "Dynamo mended it: delete this part of the work-around"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    assert hasattr(guards, "profile_guard_manager"), MENDED
    return _seen(monkeypatch, guards, "profile_guard_manager")


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    assert hasattr(_traceback, "shorten_filename"), MENDED
    return _seen(monkeypatch, _traceback, "shorten_filename")


def _seen(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    function = getattr(module, name)

    def call_and_see(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return function(*given, **named)

    monkeypatch.setattr(module, name, call_and_see)
    return calls


def test_captures_do_not_time_their_guards_and_shorten_a_path_once(
    timed: list[Any], shortened: list[Any]
) -> None:
    CompiledModule(nn.Linear(3, 4))(torch.ones(2, 3))
    assert not timed
    assert len(shortened) == len(set(shortened)) > 0


def test_canary_dynamos_own_captures_time_and_shorten_again(
    timed: list[Any], shortened: list[Any]
) -> None:
    torch.compile(nn.Linear(5, 4), backend="eager")(torch.ones(2, 5))
    assert len(timed) == 1, MENDED
    assert len(shortened) > len(set(shortened)), MENDED
