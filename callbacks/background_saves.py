"""Saves in a thread beside the training, one at a time, from a copy of the state in host memory."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric

from thunder_memsave.callbacks.all_ranks import on_all_ranks
from thunder_memsave.callbacks.step_to_save import StepToSave
from thunder_memsave.checkpoints.snapshot import Snapshot
from thunder_memsave.config import ConfigError
from thunder_memsave.measure.host_memory import free_host_bytes
from thunder_memsave.strategy import ThunderMemsaveStrategy

_log = logging.getLogger(__name__)


class BackgroundSaves:
    """Copies the state and writes the copy in a thread. Training waits only for `has_room`, `copy` and `begin`.

    The thread has a process group of its own, so that its messages cannot mix with those of the training, and uses
    no device. It does not keep the process alive.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        """Step of the save in progress, which `settle` ends; None if there is none."""
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._group: dist.ProcessGroup | None = None
        self._told: set[bool] = set()

    def has_room(self, fabric: Fabric, state: Mapping[str, Any]) -> bool:
        """Tell whether the copies of all ranks fit into the free memory of their hosts, and log it once. A collective.

        Args:
            fabric: Launched.
            state: The state to save.
        """
        num_bytes = require_snapshots(fabric).snapshot_bytes(dict(state))
        host, free = socket.gethostname(), free_host_bytes()
        needed: Counter[str] = Counter()
        least: dict[str, int] = {}
        for of_host, asked, left in on_all_ranks(fabric, lambda: (host, num_bytes, free)):
            needed[of_host] += asked
            if left is not None:
                least[of_host] = min(left, least.get(of_host, left))
        fits = all(needed[name] <= left for name, left in least.items())
        if fabric.is_global_zero and fits not in self._told:
            self._told.add(fits)
            _tell(fits, needed=needed[host], free=least.get(host))
        return fits

    def copy(self, fabric: Fabric, state: Mapping[str, Any]) -> Callable[[Path], None]:
        """Copy the state to host memory, and return a function that writes the copy. A collective."""
        if self._group is None and fabric.world_size > 1:
            timeout = require_snapshots(fabric).config.timeout
            name = "thunder_memsave saves in the background"
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
        group, taken = self._group, list[Snapshot]()
        strategy = require_snapshots(fabric)
        on_all_ranks(fabric, lambda: taken.append(strategy.snapshot(dict(state))))
        return lambda path: taken[0].write(path, group)

    def begin(self, fabric: Fabric, what: StepToSave) -> None:
        """Start to write what `copy` copied; the save before must be settled."""
        assert self._thread is None, "one save at a time: settle() comes first"

        def commit() -> None:
            try:
                self._path = what.commit(fabric, group=self._group)
            except BaseException as error:  # raised by `settle`
                self._error = error

        self.step = what.manifest.step
        name = f"save of step {self.step}"
        self._thread = threading.Thread(target=commit, name=name, daemon=True)
        self._thread.start()

    def settle(self, timeout_seconds: float | None = None) -> Path | None:
        """Wait for the save in progress, and return its path; None if there is none.

        Raises:
            TimeoutError: it is not done within the timeout.
            BaseException: the error of the save.
        """
        thread, path, error = self._thread, None, None
        if thread is not None:
            thread.join(timeout_seconds)
            if thread.is_alive():
                raise TimeoutError(f"the {thread.name} is not done after {timeout_seconds:g} s")
            path, error = self._path, self._error
            self._thread = self._path = self._error = self.step = None
        if error is not None:
            raise error
        return path


def require_snapshots(fabric: Fabric) -> ThunderMemsaveStrategy:
    """Return the strategy, if it can copy the state that it saves.

    Raises:
        ConfigError: it cannot.
    """
    strategy = fabric.strategy
    if not isinstance(strategy, ThunderMemsaveStrategy):
        raise ConfigError(
            f"checkpoints were to be written while training goes on, which needs ThunderMemsaveStrategy, and this run "
            f"has a {type(strategy).__name__}; leave asynchronous out."
        )
    if strategy.config.state_dict_type != "sharded":
        raise ConfigError(
            f"checkpoints were to be written while training goes on, but state_dict_type is "
            f"{strategy.config.state_dict_type!r}, which gathers whole tensors meanwhile; use 'sharded', or leave "
            "asynchronous out."
        )
    return strategy


def _tell(fits: bool, *, needed: int, free: int | None) -> None:
    left = "an unknown amount is" if free is None else f"{free / 2**30:.2f} GiB are"
    copies = f"the copy of the state takes {needed / 2**30:.2f} GiB of this host's memory, of which {left} free"
    if fits:
        _log.info("checkpoints are written while training goes on: until one is, %s", copies)
    else:
        _log.warning(
            "training waits while this checkpoint is written, though checkpoint.asynchronous is set: %s. Give the host "
            "more memory, or set checkpoint.asynchronous to false.",
            copies,
        )
