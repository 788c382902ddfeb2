from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import thunder_memsave
from thunder_memsave.errors import BudgetError, CaptureError, ThunderMemsaveError
from thunder_memsave.finetune.process.stop import LossSpikeError, RunInterruptedError
from thunder_memsave.finetune.run_file.keys.unknown_keys import UnknownKeyError
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

ROOT = Path(__file__).parents[1]
PACKAGES = {ROOT / "strategy": "thunder_memsave", ROOT / "callbacks": "thunder_memsave.callbacks"}
NO_MESSAGE_ALONE = {
    "ConfigErrors": ConfigErrors([ConfigError("a", key="x"), ConfigError("b", place="c:1")]),
    "UnknownKeyError": UnknownKeyError("a", key="x", meant=["y"]),
}


def error_classes() -> Iterator[tuple[str, str]]:
    for folder, package in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            module = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Errors")):
                    yield module, node.name


CLASSES = sorted(error_classes())


def example(module: str, name: str) -> ThunderMemsaveError:
    found = NO_MESSAGE_ALONE.get(name) or getattr(import_module(module), name)("what happened")
    assert isinstance(found, ThunderMemsaveError), f"{module}.{name}"
    return found


def test_all_error_classes_are_found() -> None:
    names = {name for _, name in CLASSES}
    assert {"ConfigError", "OrderError", "StartError", "DiskFullError", "StepMemoryError"} <= names


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_every_error_is_ours_and_arrives_whole_in_another_process(module: str, name: str) -> None:
    error = example(module, name)
    error.key, error.place, error.advice = "train.epochs", "rows.jsonl:7", "Do that."
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    if name != "ConfigErrors":  # of which each problem has its own
        assert vars(arrived) == vars(error)


@pytest.mark.parametrize(("module", "name"), [each for each in CLASSES if "stop" not in each[0]])
def test_every_error_but_the_end_of_a_run_is_a_built_in_one_too(module: str, name: str) -> None:
    if name != "ThunderMemsaveError":
        assert isinstance(example(module, name), ValueError | RuntimeError | ArithmeticError)


def test_several_problems_arrive_with_their_keys_and_places() -> None:
    arrived = pickle.loads(pickle.dumps(NO_MESSAGE_ALONE["ConfigErrors"]))
    assert [(str(each), each.key, each.place) for each in arrived.problems] == [
        ("a", "x", None),
        ("b", None, "c:1"),
    ]


def test_advice_follows_the_message() -> None:
    error = LossSpikeError("its loss is 9.", advice="After that, start again.")
    assert str(error) == "its loss is 9. After that, start again."
    assert error.message == "its loss is 9."


def test_a_budget_error_keeps_what_was_found() -> None:
    error = BudgetError.no_plan(budget_bytes=1, smallest_bytes=3, bound_bytes=2)
    arrived = pickle.loads(pickle.dumps(error))
    assert (arrived.smallest_bytes, arrived.bound_bytes) == (3, 2)


def test_an_error_knows_its_exit_status() -> None:
    assert CaptureError("x").code == 1
    assert ConfigError("x").code == 2
    assert BudgetError("x").code == 3
    assert RunInterruptedError("x", code=75).code == 75


def test_the_base_is_a_public_name() -> None:
    assert thunder_memsave.ThunderMemsaveError is ThunderMemsaveError
