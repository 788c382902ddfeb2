from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback

from thunder_memsave import callbacks
from thunder_memsave.callbacks.hooks import HOOKS
from thunder_memsave.finetune.run.check_references import check_references
from thunder_memsave.finetune.run_file.callback_hooks import check_hooks
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.problems import ConfigError


class Good:
    """A callback as users write it."""

    on_disk = True  # no method

    def on_train_start(self, *, control: Any, color: str = "red") -> None: ...

    def on_train_batch_end(self, metrics: Any, step: int) -> None: ...

    @staticmethod
    def on_train_end(step: int) -> None: ...

    @classmethod
    def on_exception(cls, **anything: Any) -> None: ...

    def on_after_optimizer_step(self, *, strategy: Any, optimizer: Any) -> None: ...

    def helper(self, anything: Any) -> None: ...

    def _on_my_own(self) -> None: ...


class Misspelt:
    def on_trian_end(self) -> None: ...


class NoHook(Good):
    def on_my_thing(self) -> None: ...


class NeedsLoss:
    def on_train_batch_end(self, *, step: int, loss: float, lr: float) -> None: ...


class NeedsPosition:
    def on_train_end(self, step: int, /) -> None: ...


class TakesTooLittle:
    def on_after_optimizer_step(self, *, optimizer: Any) -> None: ...


def hook(self: Any, *, fabric: Any) -> None: ...


class OfLightning(Callback):
    """Overrides hooks that a run calls, and has Lightning's other hooks."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...


for name in HOOKS.keys() - {"on_after_optimizer_step"}:
    setattr(OfLightning, name, hook)


class ForTheTrainer(Callback):
    """Inherits `on_train_start`, which Lightning's Trainer calls in its own way."""


@pytest.mark.parametrize("cls", [Good, OfLightning])
def test_callbacks_of_users_are_taken(cls: type) -> None:
    check_hooks(cls, where="callbacks[0]")


@pytest.mark.parametrize("name", callbacks.__all__)
def test_callbacks_of_ours_have_hooks_that_a_run_calls(name: str) -> None:
    check_hooks(getattr(callbacks, name), where="callbacks[0]")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Misspelt,
            "is Misspelt, whose on_trian_end is not a hook, .*; did you mean 'on_train_end'",
        ),
        (
            NoHook,
            "whose on_my_thing is not a hook, .*; the hooks are on_after_setup, on_train_start",
        ),
        (
            NeedsLoss,
            "on_train_batch_end needs 'loss', 'lr', which a run does not pass by name; it ",
        ),
        (NeedsPosition, "on_train_end needs 'step', which a run does not pass by name; it passes"),
        (TakesTooLittle, "on_after_optimizer_step must take 'strategy', 'optimizer', but has no "),
        (ForTheTrainer, "on_train_start needs 'trainer', 'pl_module', .* do not derive from that"),
    ],
)
def test_hooks_that_would_not_be_called_as_they_are_meant_are_refused(
    cls: type, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_hooks(cls, where="callbacks[1]")


def test_a_misspelt_hook_is_found_before_a_run_starts() -> None:
    spec: ClassSpec = {"class_path": f"{__name__}.Misspelt"}
    problems = Problems()
    check_references(RunConfig(callbacks=[spec]), problems)
    (problem,) = [each for each in problems.found if "callbacks" in str(each.key)]
    assert problem.key == "callbacks[0].class_path"
    assert str(problem) == (
        "callbacks[0].class_path is Misspelt, whose on_trian_end is not a hook, so that nothing would call it; did "
        "you mean 'on_train_end'?"
    )
