"""A callback for run files that notes what a run was trained on, by content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from thunder_memsave.finetune.data.packing import Batch, Rows


class SeenRows:
    """Each rank writes a line per step into a file of its own: the step, and a hash of each row's tokens.

    The run must not evaluate: that lays out rows too.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self._seen: list[str] = []
        self._lay_out = Rows.lay_out

    def on_train_start(self) -> None:
        """Watch what the loop makes batches of."""

        def lay_out(rows: Rows, chosen: Sequence[int | None]) -> Batch:
            batch = self._lay_out(rows, chosen)
            for row, ids, targets in zip(chosen, batch.input_ids, batch.targets, strict=True):
                if row is not None:
                    content = ids.numpy().tobytes() + targets.numpy().tobytes()
                    self._seen.append(sha256(content).hexdigest()[:16])
            return batch

        Rows.lay_out = lay_out  # type: ignore[method-assign,assignment]

    def on_train_batch_end(self, *, fabric: Fabric, step: int) -> None:
        """The step is taken, so its rows have been seen."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / f"{fabric.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "rows": self._seen}) + "\n")
        self._seen = []

    def on_train_end(self) -> None:
        """Watch no more."""
        Rows.lay_out = self._lay_out  # type: ignore[method-assign]


def seen_rows(directory: Path) -> dict[int, list[str]]:
    """What the ranks of a run wrote: the rows of each step, sorted."""
    seen: dict[int, list[str]] = {}
    for file in directory.iterdir():
        for line in file.read_text().splitlines():
            written: dict[str, Any] = json.loads(line)
            seen.setdefault(written["step"], []).extend(written["rows"])
    return {step: sorted(rows) for step, rows in sorted(seen.items())}
