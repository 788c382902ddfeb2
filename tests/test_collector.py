"""What a compilation made is collected where it is garbage, and goes to the oldest generation where it is not."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import patch

import pytest

from thunder_memsave.collector import collect_young, collector


class Node:
    """An object that may refer to itself."""


@pytest.mark.parametrize(("num_frozen", "calls"), [(0, ["freeze", "unfreeze"]), (7, [])])
def test_new_garbage_goes_and_the_rest_is_old_unless_others_froze(
    num_frozen: int, calls: list[str]
) -> None:
    """This process has frozen objects (`conftest.py`), which must not be thawed: so both calls are recorded alone."""
    made: list[str] = []
    with (
        collector(runs=False),
        patch.object(gc, "get_freeze_count", lambda: num_frozen),
        patch.object(gc, "freeze", lambda: made.append("freeze")),
        patch.object(gc, "unfreeze", lambda: made.append("unfreeze")),
    ):
        garbage = Node()
        garbage.itself = garbage  # type: ignore[attr-defined]
        is_there = weakref.ref(garbage)
        del garbage
        collect_young()
        assert is_there() is None
    assert made == calls
