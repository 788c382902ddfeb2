"""Imports the parts of TransformerEngine that are called, when the first function runs, or says what is missing."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version

from thunder_memsave.compat.foreign_messages import first_line
from thunder_memsave.config import ConfigError

MIN_VERSION = Version("2.10")
"""The first version whose GEMM needs no workspace from its caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The parts of TransformerEngine that are called."""

    pytorch: ModuleType
    tensor: ModuleType
    extension: ModuleType
    general_gemm: Any
    dtypes: dict[torch.dtype, Any]


@functools.cache
def loaded() -> Library:
    """Import what is called of TransformerEngine.

    Raises:
        ConfigError: It is not installed, too old, or cannot be loaded; the message says what to do.
    """
    version = installed_version()
    try:
        pytorch = importlib.import_module("transformer_engine.pytorch")
        return Library(
            pytorch=pytorch,
            tensor=importlib.import_module("transformer_engine.pytorch.tensor"),
            extension=importlib.import_module("transformer_engine_torch"),
            general_gemm=importlib.import_module(
                "transformer_engine.pytorch.cpp_extensions"
            ).general_gemm,
            dtypes=importlib.import_module("transformer_engine.pytorch.constants").TE_DType,
        )
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"TransformerEngine {version} is installed, but cannot be loaded with PyTorch {torch.__version__} "
            f"({type(error).__name__}: {first_line(error)}): install its extension, built for this PyTorch, with "
            f"`pip install --no-build-isolation 'transformer-engine[pytorch]=={version}'`"
        ) from error


def installed_version() -> Version:
    """Return the version that is installed.

    Raises:
        ConfigError: There is none, or it is too old.
    """
    imported = sys.modules.get("transformer_engine")
    try:
        version = Version(
            importlib.metadata.version("transformer_engine")
            if imported is None
            else imported.__version__
        )
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "TransformerEngine is not installed: `pip install 'thunder-memsave[te]'` does so"
        ) from None
    if version < MIN_VERSION:
        raise ConfigError(
            f"TransformerEngine {version} is installed, and {MIN_VERSION} or newer is needed, whose GEMM has a "
            "workspace of its own: `pip install --upgrade 'thunder-memsave[te]'`"
        )
    return version
