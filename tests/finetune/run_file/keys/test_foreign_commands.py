"""Commands that other tools have are answered with ours."""

from __future__ import annotations

import pytest

from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.run_file.keys.foreign_commands import FOREIGN_COMMANDS


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("finetune", "here it is 'thunder-memsave train CONFIG'."),
        ("merge", "here it is 'thunder-memsave export RUN --out DIR --merge'."),
        ("merge-lora", "here it is 'thunder-memsave export RUN --out DIR --merge'."),
        ("valdate", "did you mean 'validate'?"),
        ("xyzzy", "there are train, validate, plan, chat, export, configs"),
    ],
)
def test_a_command_of_another_name_suggests_ours(
    typed: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed, "x.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: there is no command {typed!r}; ")
    assert told in error


@pytest.mark.parametrize("typed", FOREIGN_COMMANDS)
def test_every_suggestion_is_a_command_that_exists(typed: str) -> None:
    command, *_ = FOREIGN_COMMANDS[typed].split()
    assert main([command, "--help"]) == 0
