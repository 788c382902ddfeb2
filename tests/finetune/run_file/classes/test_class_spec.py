from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from thunder_memsave.finetune.run_file.classes.class_kinds import (
    CALLBACK,
    DATASET,
    LOGGER,
    OPTIMIZER,
    check_class,
)
from thunder_memsave.finetune.run_file.classes.class_spec import build, checked_init_args
from thunder_memsave.finetune.run_file.config import ClassSpec
from thunder_memsave.settings.problems import ConfigError, ConfigErrors


class Base:
    def __init__(self, size: int, *, rate: float = 0.5, name=None, flag=True, scale=1.0) -> None:  # type: ignore[no-untyped-def]
        if rate < 0:
            raise ValueError("rate must not be negative")


def spec(class_path: str, /, **arguments: Any) -> ClassSpec:
    return ClassSpec(class_path=class_path, init_args=arguments)


def problems_of(**arguments: Any) -> set[str]:
    with pytest.raises(ConfigError) as error:
        checked_init_args(Base, spec("Base", **arguments), where="x")
    return {str(problem) for problem in ConfigErrors([error.value]).problems}


def test_all_problems_of_the_arguments_are_found_by_annotations_and_defaults() -> None:
    assert problems_of(rate="fast", nam=1, flag="yes", scale="big") == {
        "x.init_args.rate is 'fast', but must be a number.",
        "x.init_args.nam is not an argument of Base; did you mean 'name'?",
        "x.init_args.flag is 'yes', but must be true or false.",
        "x.init_args.scale is 'big', but must be a number.",
        "x.init_args needs 'size' for Base.",
    }


def test_an_argument_that_was_misspelled_is_not_missing_too() -> None:
    message = "x.init_args.siz is not an argument of Base; did you mean 'size'?"
    assert problems_of(siz=1) == {message}


def test_arguments_that_a_run_fills_need_not_be_given() -> None:
    assert checked_init_args(Base, spec("Base"), where="x", filled=("size",)) == {}


def test_what_a_constructor_says_is_told() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match="optimizer: SGD refuses its arguments: Invalid lear"):
        build(spec("SGD", lr=-1), parameters, where="optimizer", default_module="torch.optim")


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (OPTIMIZER, "AdamW"),
        (OPTIMIZER, "torch.optim.SGD"),
        (DATASET, "TextJSONL"),
        (LOGGER, "CSVLogger"),
        (CALLBACK, "EarlyStopping"),
        (CALLBACK, "thunder_memsave.callbacks.progress.ProgressBar"),
    ],
)
def test_a_class_of_the_kind_is_found_also_by_its_bare_name(kind: Any, path: str) -> None:
    arguments: dict[str, Any] = {"path": "x"} if kind is DATASET else {}
    cls = check_class(spec(path, **arguments), kind, where="x")
    assert cls.__name__ == path.rpartition(".")[2]


@pytest.mark.parametrize("kind", [OPTIMIZER, DATASET, LOGGER, CALLBACK])
@pytest.mark.parametrize("path", ["subprocess.Popen", "builtins.dict", "torch.nn.Linear"])
def test_a_class_of_another_kind_is_refused_before_it_is_called(kind: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.class_path is .*, but must be (a|an) "):
        check_class(spec(path), kind, where="x")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.Class", "No module named 'no'; install its package, or put its directory into"),
        ("torch.optim.AdamX", "but its module has no such class; did you mean 'Adam"),
        (
            "torch.optim.lr_scheduler",
            "'torch.optim.lr_scheduler', but its module has no such class.",
        ),
        ("..", "which is not the path of a class"),
        ("broken_module.A", r"whose module fails at .*broken_module.py:2: ZeroDivisionError"),
        ("broken_syntax.A", r"whose module fails at .*: SyntaxError"),
    ],
)
def test_a_class_that_cannot_be_imported_is_refused(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("x = 0\ny = 1 / x\n")
    (tmp_path / "broken_syntax.py").write_text("def (\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        check_class(spec(path), OPTIMIZER, where="x")
    assert error.value.key == "x.class_path"
