"""Whose kernels compute in fp8: TransformerEngine's or PyTorch's."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from thunder_memsave.config import Fp8Config
from thunder_memsave.fp8 import te_backend, torch_backend
from thunder_memsave.fp8.symbols import Backend

_log = logging.getLogger(__name__)


def choose_backend(config: Fp8Config, device: torch.device) -> Backend:
    """The backend that is asked for, or that can compute on `device`.

    Raises:
        ConfigError: it cannot; says what is there.
    """
    backend = _best(config, device) if config.backend == "auto" else config.backend
    if backend == "transformer_engine":
        te_backend.require(config.recipe, device)
    else:
        torch_backend.require(config.recipe, device)
    return backend


def _best(config: Fp8Config, device: torch.device) -> Literal["transformer_engine", "torch"]:
    if device.type != "cuda":
        return "torch"
    reason = te_backend.why_not(config.recipe, device)
    if reason is None:
        return "transformer_engine"
    _log.info("fp8.backend 'auto' takes torch: %s", reason)
    return "torch"
