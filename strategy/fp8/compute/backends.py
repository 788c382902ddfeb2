"""Chooses the fp8 backend: TransformerEngine or PyTorch."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from thunder_memsave.config import ConfigError, Fp8Config
from thunder_memsave.fp8.compute.operators import Backend
from thunder_memsave.fp8.kernels import te_backend, torch_support
from thunder_memsave.fp8.recipe import RecipeName

_log = logging.getLogger(__name__)


def choose_backend(config: Fp8Config, device: torch.device) -> Backend:
    """Return the requested backend; for `auto`, the best one for `device`.

    Raises:
        ConfigError: It cannot compute on `device`; the message says why.
    """
    backend = _best(config, device) if config.backend == "auto" else config.backend
    require(backend, config.recipe, device)
    return backend


def require(backend: Backend, recipe: RecipeName, device: torch.device) -> None:
    """Refuse a backend that cannot compute a recipe on a device.

    Args:
        backend: The chosen backend.
        recipe: The value of `fp8.recipe`.
        device: The model's device.

    Raises:
        ConfigError: It cannot; the message says what is missing and what to do.
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
