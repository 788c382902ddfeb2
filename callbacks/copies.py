"""Copies the checkpoints of a run to an address of fsspec, beside the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning.fabric import Fabric

from thunder_memsave.callbacks.step_directories import (
    Best,
    is_checkpoint_name,
    list_checkpoints,
    step_of,
    the_best,
    whole_manifest,
)
from thunder_memsave.checkpoints.addresses import RunAtAddress
from thunder_memsave.checkpoints.manifest import (
    DamagedCheckpointError,
    Manifest,
    UnverifiableCheckpointError,
)
from thunder_memsave.errors import ThunderMemsaveError

_LONGEST_WAIT_SECONDS = 30.0
"""Longest wait for the copy in progress when the run ends with an error, which must not hang."""

_log = logging.getLogger(__name__)


class CheckpointCopies:
    """Lets an address hold what the directory of the checkpoints holds, from rank 0, in a thread.

    The first copies are made at the start, and more after each checkpoint; at most one thread is at it, and the newest
    checkpoint comes first. An error is a warning, until `finish`. What another machine wrote there stays as long as it
    is among the last or the best; nothing is deleted there before this run has saved.

    Args:
        directory: The directory of the checkpoints, on the local disk.
        address: Address of the run, under which they are in `checkpoints/`.
        keep_last: Number of newest checkpoints to keep there.
        best: Which ones to keep besides.
        beside: Files to copy before the checkpoints, if they exist.
    """

    def __init__(
        self,
        directory: Path,
        address: str,
        *,
        keep_last: int = 2,
        best: Best | None = None,
        beside: Sequence[Path] = (),
    ) -> None:
        self.address = address
        self._directory = directory
        self._keep_last = keep_last
        self._best = best
        self._beside = beside
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_due = False
        self._has_saved = False

    def on_train_start(self, *, fabric: Fabric) -> None:
        """Copy what an earlier start could not."""
        if fabric.is_global_zero:
            self._request()

    def after_commit(self) -> None:
        """Copy the new checkpoint, which a `ModelCheckpoint` has written on rank 0."""
        self._has_saved = True
        self._request()

    def on_exception(self) -> None:
        """Let the copy in progress finish."""
        self.wait(_LONGEST_WAIT_SECONDS)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until nothing is being copied."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)

    def finish(self, exported: Path | None = None) -> None:
        """Wait for the thread, try again what it could not copy, and copy the export. On rank 0.

        Raises:
            AddressError: something could not be copied or deleted.
        """
        self.wait()
        self.sync()
        if exported is not None:
            RunAtAddress(self.address).put_export(exported)

    def sync(self) -> None:
        """Copy each local checkpoint that is not there, the newest first; then delete there what is to go.

        Raises:
            AddressError: something could not be copied or deleted.
        """
        run = RunAtAddress(self.address)
        for path in self._beside:
            if path.exists():
                run.put(path, path.name)
        here = list_checkpoints(self._directory)
        for path in reversed(here):
            run.upload(path)
        if self._has_saved:
            self._delete(run, list_checkpoints(self._directory))

    def _delete(self, run: RunAtAddress, here: Sequence[Path]) -> None:
        own = {path.name for path in here}
        others = [n for n in run.names() if is_checkpoint_name(n) and n not in own]
        if not others or not here:
            return
        manifests = {path.name: whole_manifest(path) for path in here}
        newest = step_of(here[-1])
        manifests |= {n: _manifest_there(run, n) for n in others if step_of(Path(n)) < newest}
        whole = {name: each for name, each in manifests.items() if each is not None}
        kept = _kept(whole, keep_last=self._keep_last, best=self._best)
        for name in others:
            if name not in kept:
                run.delete(name)

    def _request(self) -> None:
        """Let the thread copy what there is now, after what it is at."""
        with self._lock:
            self._is_due = True
            if self._thread is None:
                work = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)
                self._thread = work
                work.start()

    def _work(self) -> None:
        while self._takes_due():
            try:
                self.sync()
            except (ThunderMemsaveError, OSError) as error:
                _log.warning(
                    "the checkpoints were not copied to %s: %s. Training goes on, and the next checkpoint, or the end, "
                    "tries it again.",
                    self.address,
                    error,
                )

    def _takes_due(self) -> bool:
        with self._lock:
            is_due, self._is_due = self._is_due, False
            if not is_due:
                self._thread = None
            return is_due


def _manifest_there(run: RunAtAddress, name: str) -> Manifest | None:
    with suppress(DamagedCheckpointError, UnverifiableCheckpointError):
        signed = run.find(name)
        return None if signed is None else signed.manifest
    return None


def _kept(manifests: Mapping[str, Manifest], *, keep_last: int, best: Best | None) -> set[str]:
    """Return the names of the last and the best of these checkpoints."""
    by_step = sorted(manifests, key=lambda name: step_of(Path(name)))
    kept = set(by_step[-keep_last:])
    if best is not None:
        kept |= set(the_best({n: manifests[n].metrics.get(best.metric) for n in by_step}, best))
    return kept
