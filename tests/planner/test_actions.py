from __future__ import annotations

import pickle
import re

import pytest

from thunder_memsave.planner.actions import (
    KEEP,
    NO_ACTIONS,
    OFFLOAD,
    RECOMPUTE,
    REGATHER,
    REPLAY,
    Action,
    Actions,
    keeping,
)


def test_actions_are_the_same_in_whatever_order_they_are_given() -> None:
    first, second = Actions({"b": KEEP, "a": REPLAY}), Actions({"a": REPLAY, "b": KEEP})
    assert first == second
    assert {first, second, Actions({"a": KEEP, "b": KEEP})} == {first, keeping("ba")}
    assert (list(first), str(first)) == (["a", "b"], str(second))


def test_actions_do_not_follow_what_they_were_made_of() -> None:
    given = {"a": KEEP}
    actions = Actions(given)
    given["a"] = RECOMPUTE
    assert actions == {"a": KEEP}


def test_actions_are_the_same_on_another_rank() -> None:
    actions = Actions({"a": REGATHER, "b": KEEP})
    other = pickle.loads(pickle.dumps(actions))
    assert (other, hash(other)) == (actions, hash(actions))


def test_what_is_kept_or_on_the_host_is_left_for_backward_and_nothing_else() -> None:
    actions = Actions({"a": KEEP, "b": RECOMPUTE, "c": REGATHER, "d": REPLAY, "e": OFFLOAD})
    assert actions.kept == {"a", "e"}
    assert actions.offloaded == {"e"}
    assert actions.only(["d", "a", "x"]) == {"a": KEEP, "d": REPLAY}
    assert NO_ACTIONS.kept == frozenset()


def test_an_unknown_action_is_refused() -> None:
    message = "no action is called 'shrink'; there are keep, recompute, regather, replay, offload."
    with pytest.raises(ValueError, match=re.escape(message)):
        Action("shrink")  # type: ignore[arg-type]
