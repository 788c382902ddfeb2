"""A capture reads no module for a log that is off; torch alone still asks for every name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo import funcname_cache, symbolic_convert


@pytest.fixture
def logged() -> Iterator[None]:
    torch._logging.set_logs(trace_call=True)
    yield
    torch._logging.set_logs()


def add_one(x: Tensor) -> Tensor:
    return x + 1


def test_canary_dynamo_asks_for_names_although_the_log_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(symbolic_convert, "get_funcname", lambda file, line: asked.append(file))
    torch.compile(add_one, backend="eager")(torch.zeros(2))
    assert __file__ in asked


def test_no_file_is_read_while_the_log_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(funcname_cache, "cache", {})
    assert symbolic_convert.get_funcname(__file__, add_one.__code__.co_firstlineno) is None
    assert funcname_cache.cache == {}


@pytest.mark.usefixtures("logged")
def test_the_log_shows_names_as_before() -> None:
    line = add_one.__code__.co_firstlineno
    assert symbolic_convert.get_funcname(__file__, line) == "add_one"
