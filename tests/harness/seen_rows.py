"""A callback for run files that records the rows that a run was trained on, by content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from thunder_memsave.finetune.data.packing import Batch, Rows


class SeenRows:
    """Writes, on each rank, a line per step into the rank's file: the step, and a hash of each row's tokens.

    The run must not evaluate: evaluation lays out rows too.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self._seen: list[str] = []
        self._of_step: list[str] = []
        self._lay_out = Rows.lay_out

    def on_train_start(self) -> None:
        """Begin to record the rows of the loop's batches."""

        def lay_out(rows: Rows, chosen: Sequence[int | None]) -> Batch:
            batch = self._lay_out(rows, chosen)
            for row, ids, targets in zip(chosen, batch.input_ids, batch.targets, strict=True):
                if row is not None:
                    content = ids.numpy().tobytes() + targets.numpy().tobytes()
                    self._seen.append(sha256(content).hexdigest()[:16])
            return batch

        Rows.lay_out = lay_out  # type: ignore[method-assign,assignment]

    def on_train_batch_start(self) -> None:
        """Note the step's rows: the next step's are laid out before this one ends."""
        self._of_step, self._seen = self._seen, []

    def on_train_batch_end(self, *, fabric: Fabric, step: int) -> None:
        """Write the rows of the step, which is done."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / f"{fabric.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "rows": self._of_step}) + "\n")

    def on_train_end(self) -> None:
        """End the recording."""
        Rows.lay_out = self._lay_out  # type: ignore[method-assign]


def seen_rows(directory: Path) -> dict[int, list[str]]:
    """Return the rows of each step that the ranks of a run wrote, sorted."""
    seen: dict[int, list[str]] = {}
    for file in directory.iterdir():
        for line in file.read_text().splitlines():
            written: dict[str, Any] = json.loads(line)
            seen.setdefault(written["step"], []).extend(written["rows"])
    return {step: sorted(rows) for step, rows in sorted(seen.items())}
