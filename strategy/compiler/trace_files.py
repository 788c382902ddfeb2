"""Writes the trace after each step into a directory, for those who debug."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch.distributed as dist

from thunder_memsave.checkpoints.commit import write_file
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.passes.step import Traces

_NAMES = ("forward", "backward", "backward that keeps gradients")

_log = logging.getLogger(__name__)


class TraceFiles:
    """The files of one compilation on one rank; where a disk refuses them, a warning says so and there are no more."""

    def __init__(self, trace_dir: str, *, call: str, data_parallel: DataParallel | None) -> None:
        """Write nothing yet.

        Args:
            trace_dir: Gets a folder for each rank, and in that one for each compilation.
            call: What is compiled.
            data_parallel: The ranks; None on one device.
        """
        rank = 0 if data_parallel is None else dist.get_rank(data_parallel.everyone)
        self._of_rank, self._call = Path(trace_dir) / f"rank{rank}", call
        self._folder: Path | None = None
        self._written: list[str] = []
        self._is_refused = False

    def write(self, step: str, traces: Traces, *, before: Traces | None) -> None:
        """Write the traces after a step, or that it left those `before` it as they were."""
        if self._is_refused:
            return
        name = f"{len(self._written):02}-{step}.py"
        try:
            if self._folder is None:
                self._folder = _new_folder(self._of_rank, self._call)
            text = self._text(traces, before)
            write_file(self._folder / name, partial(_write, text=text))
        except OSError as error:
            self._is_refused = True
            _log.warning(
                "strategy.trace_dir: %s cannot be written (%s), so there are no traces of %s from there on; training "
                "goes on. Name a directory that this process may write to, with space.",
                (self._folder or self._of_rank) / name,
                error.strerror or error,
                self._call,
            )
        self._written.append(name)

    def _text(self, traces: Traces, before: Traces | None) -> str:
        now = traces.current
        if before is not None and _are_the_very_same(traces, before):
            return f"# Nothing to do: as after {self._written[-1]}.\n"
        if len(now) == 1:
            return f"{now[0]}\n"
        parts = zip(_NAMES, now, strict=False)
        return "\n\n".join(f"# The {name}:\n\n{trace}\n" for name, trace in parts)


def _are_the_very_same(traces: Traces, before: Traces) -> bool:
    now, then = traces.current, before.current
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _new_folder(parent: Path, call: str) -> Path:
    """Make the next folder of this call; those of earlier captures, and of earlier runs, stay."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + sum(1 for _ in parent.iterdir())
    while True:
        folder = parent / f"{number:02}-{call}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _write(path: Path, *, text: str) -> None:
    path.write_text(text, encoding="utf-8")
