from __future__ import annotations

import math
from typing import Any

import pytest
from lightning.fabric import Fabric

from thunder_memsave.callbacks import CallbackStates, EarlyStopping, TrainingControl


def evaluations(callback: EarlyStopping, values: list[float], name: str = "val_loss") -> int | None:
    """Run a plain Fabric loop, and return the evaluation after which it ended early."""
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[callback])
    control = TrainingControl()
    fabric.call("on_train_start", control=control)
    for number, value in enumerate(values, start=1):
        if control.is_asked:
            return number - 1
        fabric.call("on_validation_end", metrics={name: value}, control=control)
    return len(values) if control.is_asked else None


def test_the_end_comes_after_patience_evaluations_without_an_improvement() -> None:
    assert evaluations(EarlyStopping(patience=2), [3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 1.0]) == 6


def test_improvements_go_on_for_ever() -> None:
    assert evaluations(EarlyStopping(patience=1), [3.0, 2.0, 1.0]) is None


def test_a_change_up_to_min_delta_is_no_improvement() -> None:
    assert evaluations(EarlyStopping(patience=1, min_delta=0.5), [3.0, 2.5, 1.0]) == 2


def test_larger_may_be_better() -> None:
    callback = EarlyStopping(monitor="accuracy", patience=1, mode="max")
    assert evaluations(callback, [0.5, 0.6, 0.6], "accuracy") == 3


def test_what_is_not_a_number_is_no_improvement() -> None:
    assert evaluations(EarlyStopping(patience=2), [math.nan, math.nan]) == 2


def test_the_reason_tells_the_best_value() -> None:
    control = TrainingControl()
    callback = EarlyStopping(patience=1)
    for value in (2.0, 3.0):
        callback.on_validation_end(metrics={"val_loss": value}, control=control)
    expected = "val_loss has not improved in the last 1 evaluations (best: 2.0000)"
    assert control.reason == expected


def test_a_resumed_run_ends_at_the_same_evaluation() -> None:
    first, second = EarlyStopping(patience=3), EarlyStopping(patience=3)
    assert evaluations(first, [2.0, 2.1]) is None
    second.load_state_dict(first.state_dict())
    assert evaluations(second, [2.2, 2.3, 2.4]) == 2


def test_a_run_that_ended_early_ends_at_once_when_it_is_resumed() -> None:
    first, second = EarlyStopping(patience=1), EarlyStopping(patience=1)
    evaluations(first, [2.0, 2.1])
    second.load_state_dict(first.state_dict())
    assert evaluations(second, [1.0, 0.5]) == 0


def test_a_metric_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"monitors 'loss', but an evaluation gives \['val_loss'\]"
    ):
        evaluations(EarlyStopping(monitor="loss"), [1.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience is 0, but must be at least 1 evaluation."),
        ({"min_delta": -1.0}, "min_delta is -1.0, but must not be negative."),
        ({"mode": "lowest"}, "mode is 'lowest', but must be 'min' or 'max'."),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EarlyStopping(**arguments)


def test_states_go_by_class_and_number_and_a_new_callback_starts_anew() -> None:
    callbacks = [EarlyStopping(), object(), EarlyStopping(), EarlyStopping()]
    saved = CallbackStates(callbacks[:3])
    for number, callback in enumerate(callbacks):
        if isinstance(callback, EarlyStopping):
            callback.num_waited = number
    state = saved.state_dict()
    assert list(state) == ["EarlyStopping.0", "EarlyStopping.1"]
    resumed = [EarlyStopping(), EarlyStopping(), EarlyStopping()]
    CallbackStates(resumed).load_state_dict(state)
    assert [callback.num_waited for callback in resumed] == [0, 2, 0]
