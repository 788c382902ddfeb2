"""Writes the best run of a search as a run file: the user's own, with the keys that change."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from thunder_memsave.finetune.plan.search.forecast import Row
from thunder_memsave.finetune.plan.search.search import shown
from thunder_memsave.finetune.run_file.reading.overrides import apply_override, parse_overrides
from thunder_memsave.finetune.run_file.reading.parse import RunFile, load_run_config
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.settings.yaml_file import PlainDumper, read_yaml

_MOST_ON_A_MACHINE = 8


def write_best(path: Path, best: Row, run_file: RunFile, *, sets_ranks: bool) -> None:
    """Write the file, whole or not at all.

    Args:
        path: A file that does not exist.
        best: The run.
        run_file: The user's own: its keys, and those of the command line, stay.
        sets_ranks: Whether the number of ranks was searched too, so that the file says it.

    Raises:
        ConfigError: the file exists by now, or cannot be written.
    """
    text = _text(best, run_file, sets_ranks=sets_ranks)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.stem}-", suffix=".yaml", encoding="utf-8"
    ) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        load_run_config(file.name)  # an assertion: it is read as any run file
        try:
            os.link(file.name, path)
        except FileExistsError:
            raise ConfigError(
                f"--write is {path}, which exists by now and stays as it is; name a new file."
            ) from None


def _text(best: Row, run_file: RunFile, *, sets_ranks: bool) -> str:
    values = read_yaml(run_file.path).values
    words: list[str] = [*run_file.overrides.values()]
    for typed in [*words, *_changes(best, sets_ranks=sets_ranks)]:
        for override in parse_overrides(typed.split(" ", 1)):
            apply_override(values, override)
    body = yaml.dump(values, Dumper=PlainDumper, sort_keys=False, allow_unicode=True)
    change = best.change or "as it was"
    ranks = f"{best.num_ranks} rank{'' if best.num_ranks == 1 else 's'} of {best.device}"
    return f"# {run_file.path.name}, {change}: found by `thunder-memsave plan --search` for {ranks}.\n{body}"


def _changes(best: Row, *, sets_ranks: bool) -> Sequence[str]:
    changes = [f"--{key}={shown(value)}" for key, value in best.values.items()]
    if sets_ranks and best.num_ranks <= _MOST_ON_A_MACHINE:
        changes.append(f"--devices={best.num_ranks}")
    return changes
