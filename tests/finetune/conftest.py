"""Fixtures: a tokenizer directory and a model directory, made once per session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from harness.language_model import write_model, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_directory)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with one layer, which compiles sooner."""
    return write_model(tmp_path_factory.mktemp("one_layer"), num_hidden_layers=1)
