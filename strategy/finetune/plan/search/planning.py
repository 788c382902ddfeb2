"""Plans several runs at once, each in a process of its own, whose memory is given back with it."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import forkserver, util
from typing import TypeAlias

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.finetune.plan.other_formats import with_values
from thunder_memsave.finetune.plan.plan_run import plan_run
from thunder_memsave.finetune.plan.search.asked import Asked
from thunder_memsave.finetune.plan.search.forecast import Forecast
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.measure.host_memory import free_host_bytes

_log = logging.getLogger(__name__)

_MOST_PROCESSES = 8
_BYTES_OF_EACH = 6 << 30
"""What a plan of a 70B model may take, libraries included."""

_Found: TypeAlias = Forecast | ThunderMemsaveError


def num_processes() -> int:
    """Return how many plans this machine makes at once: one for each core, as far as there is memory."""
    free_bytes = free_host_bytes()
    fitting = _MOST_PROCESSES if free_bytes is None else free_bytes // _BYTES_OF_EACH
    return max(1, min(len(os.sched_getaffinity(0)), _MOST_PROCESSES, fitting))


class Planning:
    """Plans runs that differ from one in the values of some keys."""

    def __init__(self, config: RunConfig, num_at_once: int) -> None:
        """`num_at_once`: plans at the same time; one by itself is made in this process."""
        self._config = config
        self._pool: ProcessPoolExecutor | None = None
        self._begun: dict[Future[_Found], Asked] = {}
        self._waiting: list[Asked] = []
        """Runs that are planned in this process."""
        if num_at_once > 1:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            forkserver.ensure_running()  # loads libraries beside this process
            self._pool = ProcessPoolExecutor(
                num_at_once,
                mp_context=context,
                initializer=_ignore_interrupts,
                max_tasks_per_child=1,
            )

    def begin(self, asked: Asked) -> None:
        """Begin to plan a run."""
        if self._pool is None:
            self._waiting.append(asked)
            return
        sent = replace(asked, setting=asked.setting.as_plain)
        try:
            self._begun[self._pool.submit(_planned, self._config, sent)] = asked
        except BrokenProcessPool:
            self._go_on_alone()
            self._waiting.append(asked)

    def ended(self) -> tuple[Asked, _Found]:
        """Wait for one of the plans that were begun, and return what there is to say, or why it cannot be made."""
        if self._begun:
            done, _ = wait(self._begun, return_when=FIRST_COMPLETED)
            first = next(future for future in self._begun if future in done)
            try:
                found = first.result()
            except BrokenProcessPool:
                self._go_on_alone()
            else:
                return self._begun.pop(first), found
        asked = self._waiting.pop(0)
        return asked, _planned(self._config, asked)

    def _go_on_alone(self) -> None:
        _log.warning(
            "a process ended while it planned, perhaps for want of memory; from here on plans are made one after the "
            "other."
        )
        self._waiting += self._begun.values()
        self._begun.clear()
        self.end()
        self._pool = None

    def end(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def kill(self) -> None:
        """End the processes in the middle of their plans, before this one ends."""
        if self._pool is not None:
            for process in multiprocessing.active_children():
                process.kill()
            # Names of semaphores, of which a warning would say that they are left.
            util._run_finalizers()  # type: ignore[attr-defined]  # what runs when a process ends otherwise


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the process that asked, and garbage to the end, which is soon."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()


def _planned(config: RunConfig, asked: Asked) -> _Found:
    gc.collect()  # the traces of the plan before: Python's collector is off
    setting = asked.setting
    try:
        made = plan_run(
            with_values(config, asked.values),
            device=setting.device,
            num_ranks=setting.num_ranks,
            has_curve=False,
            has_few_layers=asked.has_few_layers,
        )
    except ThunderMemsaveError as error:
        if asked.has_few_layers:  # the whole says what is wrong, if it is
            return _planned(config, replace(asked, has_few_layers=False))
        return error
    return Forecast.of_plan(made)
