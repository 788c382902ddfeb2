"""A tiny model, and data with preferences for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.language_model import WORDS, write_model

Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def pair_rows() -> Rows:
    """Pairs of texts whose lengths differ."""
    return [
        {
            "prompt": f"{WORDS[row % 7]} {row}",
            "chosen": " red" + _words(row, 1 + row % 4),
            "rejected": " blue" + _words(row + 3, 1 + row % 3),
        }
        for row in range(12)
    ]


@pytest.fixture(scope="session")
def labelled_rows(pair_rows: Rows) -> Rows:
    """Texts, some of which are desirable."""
    return [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if index % 3 else "rejected"],
            "label": bool(index % 3),
        }
        for index, row in enumerate(pair_rows)
    ]


def _words(first: int, count: int) -> str:
    return "".join(f" {WORDS[(first + k) % len(WORDS)]}" for k in range(count))
