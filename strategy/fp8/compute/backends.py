"""Whose kernels compute in fp8: TransformerEngine's or PyTorch's."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from thunder_memsave.config import ConfigError, Fp8Config
from thunder_memsave.fp8.compute.symbols import Backend
from thunder_memsave.fp8.kernels import te_backend, torch_support
from thunder_memsave.fp8.recipe import RecipeName

_log = logging.getLogger(__name__)


def choose_backend(config: Fp8Config, device: torch.device) -> Backend:
    """The backend that is asked for, or that can compute on `device`.

    Raises:
        ConfigError: it cannot; says what is there.
    """
    backend = _best(config, device) if config.backend == "auto" else config.backend
    require(backend, config.recipe, device)
    return backend


def require(backend: Backend, recipe: RecipeName, device: torch.device) -> None:
    """Refuse to begin where a backend cannot compute.

    Args:
        backend: That was chosen.
        recipe: As `fp8.recipe` names it.
        device: That the model is on.

    Raises:
        ConfigError: with what is missing, and what can be done.
    """
    is_torch = backend == "torch"
    reason = (torch_support if is_torch else te_backend).why_not(recipe, device)
    if reason is not None:
        or_else = "" if is_torch else "; or set `fp8.backend: torch`"
        raise ConfigError(
            f"fp8.backend is {backend} and fp8.recipe is {recipe}, but {reason}{or_else}.",
            key="fp8.recipe" if is_torch else "fp8.backend",
        )


def _best(config: Fp8Config, device: torch.device) -> Literal["transformer_engine", "torch"]:
    if device.type != "cuda":
        return "torch"
    reason = te_backend.why_not(config.recipe, device)
    if reason is None:
        return "transformer_engine"
    _log.info("fp8.backend 'auto' takes torch: %s", reason)
    return "torch"
