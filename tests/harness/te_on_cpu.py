"""Imports TransformerEngine's own Python on a machine without CUDA, with its compiled kernels emulated.

`make setup` puts the pure-python wheel into a folder of its own, not among the installed packages:
with it there, but without a compiled extension, `import thunder` fails.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest.mock import MagicMock, patch

import torch
import torch._inductor.utils  # before a placeholder replaces triton, which this import would use

from harness import te_kernels

FOLDER = Path(sys.prefix) / "transformer-engine"
_EXTENSION = "transformer_engine_torch"
_OWN = ("transformer_engine", _EXTENSION)
# Imported by TransformerEngine's python for kernels and exports that no test runs.
_PLACEHOLDERS = (
    *("triton", "triton.language", "triton.language.core", "triton.language.standard"),
    *("onnx", "onnxscript", "einops"),
)
_CAPABILITIES = {"Hopper": (9, 0), "Blackwell": (10, 0)}

_modules: dict[str, ModuleType] = {}
_found: dict[str, str] = {"chip": "Hopper"}


@contextlib.contextmanager
def transformer_engine(chip: Literal["Hopper", "Blackwell"] = "Hopper") -> Iterator[ModuleType]:
    """Make `transformer_engine.pytorch` of the wheel importable inside the block only.

    The import (about two seconds) happens once per process. Counts of emulated kernels begin anew. `chip` is what it
    finds to compute on: on Blackwell, MXFP8 and NVFP4 alone are emulated.
    """
    if not _modules:
        _import()
    te_kernels.calls.clear()
    _pretend(chip)
    state: Any = _modules["transformer_engine.pytorch.quantization"]
    sys.modules.update(_modules)
    sys.path.append(str(FOLDER))  # where its version is looked up
    try:
        # Its quantiser of NVFP4 asks for the device on which it makes the matrix of its transform.
        with patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
            yield _modules["transformer_engine.pytorch"]
    finally:
        state.FP8GlobalStateManager.reset()
        _modules.update(_take(*_OWN))
        sys.path.remove(str(FOLDER))


def _import() -> None:
    """Keep all modules of TransformerEngine, and leave none of them in `sys.modules`."""
    if not FOLDER.is_dir():
        raise FileNotFoundError(f"TransformerEngine's python is not in {FOLDER}: run `make setup`")
    with _as_if_built(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside TransformerEngine
        common = importlib.import_module("transformer_engine.common")
        extension = _Extension(_EXTENSION)
        with patch.object(common, "load_framework_extension", lambda _: None):
            sys.modules[_EXTENSION] = extension
            importlib.import_module("transformer_engine.pytorch")
            importlib.import_module("transformer_engine.pytorch.ops")
    _modules.update(_take(*_OWN))
    te_kernels.install(extension)
    _on_the_cpu(_modules)


def _take(*packages: str) -> dict[str, ModuleType]:
    """Remove the modules of these packages from `sys.modules`, and return them."""
    names = [name for name in sys.modules if name.split(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


@contextlib.contextmanager
def _as_if_built() -> Iterator[None]:
    """Keep its import from looking for libraries, and from compiling anything with torch."""
    environment = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
    path = [str(FOLDER), *sys.path]
    absent = [
        name for name in _PLACEHOLDERS if importlib.util.find_spec(name.split(".")[0]) is None
    ]
    sys.modules.update({name: MagicMock(name=name, __version__="3.9.0") for name in absent})
    with patch.dict(os.environ, environment), patch.object(sys, "path", path):
        try:
            yield
        finally:
            _take(*absent)


def _pretend(chip: Literal["Hopper", "Blackwell"]) -> None:
    """Let TransformerEngine find a chip."""
    _found["chip"] = chip
    is_blackwell = chip == "Blackwell"
    quantization: Any = _modules["transformer_engine.pytorch.quantization"]
    supported, needs_blackwell = (
        (True, ""),
        (False, "Device compute capability 10.0 or higher required"),
    )
    quantization._MXFP8_SUPPORT = supported if is_blackwell else needs_blackwell
    quantization._NVFP4_SUPPORT = quantization._MXFP8_SUPPORT
    quantization._FP8_SUPPORT = quantization._FP8_BLOCK_SCALING_SUPPORT = supported


def _on_the_cpu(modules: dict[str, ModuleType]) -> None:
    """Answer what TransformerEngine asks of the device, and create on the CPU by default."""
    for name, module in modules.items():
        for asked, answer in _ANSWERS.items():
            if name.startswith("transformer_engine.pytorch") and hasattr(module, asked):
                setattr(module, asked, answer)
    quantization: Any = modules["transformer_engine.pytorch.quantization"]
    quantization.FP8GlobalStateManager.fp8_graph_capturing = staticmethod(lambda: False)
    create = quantization.RecipeState.create

    def create_on_cpu(*args: Any, device: torch.device | None = None, **options: Any) -> Any:
        return create(*args, device=device or torch.device("cpu"), **options)

    quantization.RecipeState.create = staticmethod(create_on_cpu)


_ANSWERS = {
    "get_device_compute_capability": lambda *_: _CAPABILITIES[_found["chip"]],
    "is_non_tn_fp8_gemm_supported": lambda *_: _found["chip"] == "Blackwell",
    "get_cublas_workspace": lambda *_: torch.empty(1, dtype=torch.uint8),
    "_empty_tensor": torch.Tensor,
}


class _DType(enum.IntEnum):
    """Stands in for `transformer_engine_torch.DType`."""

    kByte = 0  # noqa: N815
    kInt32 = 2  # noqa: N815
    kFloat32 = 4  # noqa: N815
    kFloat16 = 5  # noqa: N815
    kBFloat16 = 6  # noqa: N815
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815


class _Names(type):
    """An enumeration of the extension whose names alone matter: they are numbered in order of use."""

    __members__: dict[str, int]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = cls.__dict__["__members__"]
        members[name] = int.__new__(cls, len(members))  # type: ignore[arg-type]
        setattr(cls, name, members[name])
        return members[name]


class _Extension(ModuleType):
    """Stands in for the compiled extension: its enumerations, and functions that refuse to run."""

    DType = _DType

    @staticmethod
    def get_cudnn_version() -> int:
        return 91900

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Names(name, (int,), {"__members__": {}}) if name[0].isupper() else _missing(name)
        setattr(self, name, value)
        return value


def _missing(name: str) -> Any:
    def kernel(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"tex.{name} is not emulated: see tests/harness/te_kernels.py")

    return kernel
