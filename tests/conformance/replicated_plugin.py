"""A pytest plugin for Lightning's own tests: the strategy's name then means replicas, like DDP.

Lightning's tests take the strategy from `LT_STRATEGY`, a name. By that name our strategy shards,
and tests of DDP look at whole gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY

from thunder_memsave import ThunderMemsaveStrategy

_made: list[ThunderMemsaveStrategy] = []


def make_replicated(**arguments: Any) -> ThunderMemsaveStrategy:
    """Make the strategy that Fabric finds under our name."""
    _made.append(ThunderMemsaveStrategy(sharding="none", **arguments))
    return _made[-1]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that passed without us."""
    if not any(strategy.data_parallel for strategy in _made):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


STRATEGY_REGISTRY.register("thunder_memsave", make_replicated, override=True)
