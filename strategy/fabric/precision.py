"""The supported precision plugins of Fabric, and adapters for those that need one."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from typing_extensions import override

from thunder_memsave.config import ConfigError, Fp8Config
from thunder_memsave.fp8.kernels.te_settings import config_of, difference
from thunder_memsave.fp8.recipe import recipe_of

_SUPPORTED = "32-true, 64-true, bf16-true, 16-true, bf16-mixed, 16-mixed and transformer-engine"
_REFUSED: dict[type[Precision], str] = {
    BitsandbytesPrecision: "weights quantized by bitsandbytes cannot be captured",
    FSDPPrecision: "it configures torch's FSDP, which this strategy does not use",
    DeepSpeedPrecision: "it configures DeepSpeed, which this strategy does not use",
    XLAPrecision: "XLA devices are not supported",
}


def refuse_unsupported(precision: Precision) -> None:
    """Refuse a precision plugin that does not work with this strategy.

    Raises:
        ConfigError: the plugin is not supported; the message lists those that are.
    """
    for cls, reason in _REFUSED.items():
        if isinstance(precision, cls):
            raise ConfigError(
                f"the precision plugin {type(precision).__name__} does not work with "
                f"thunder_memsave: {reason}; the supported precisions are {_SUPPORTED}."
            )


def share_found_inf(precision: Precision, group: ProcessGroup) -> None:
    """Let all ranks skip a step when one finds an overflow, by replacing the gradient scaler.

    Every rank sees only its shard's gradients, so with torch's own scaler a rank whose shard is
    finite would step while another one skips.

    Raises:
        ConfigError: the scaler is of a user-defined type, which cannot be replaced.
    """
    scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
    if scaler is None or isinstance(scaler, ShardedGradScaler):
        return
    assert isinstance(precision, MixedPrecision)
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        raise ConfigError(
            f"the gradient scaler {type(scaler).__name__} decides for its own rank's shard only; "
            "pass a torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
        )
    sharded = ShardedGradScaler(
        scaler._device,
        init_scale=scaler._init_scale,
        backoff_factor=scaler.get_backoff_factor(),
        growth_factor=scaler.get_growth_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
        process_group=group,
    )
    precision.scaler = sharded


class CapturedTransformerEngine(TransformerEnginePrecision):
    """`TransformerEnginePrecision` for a captured model, whose own linears compute in fp8.

    Lightning's plugin by default replaces them by TransformerEngine's modules, which cannot be captured. This one
    keeps the linears, and its recipe becomes the strategy's `fp8`.
    """

    def __init__(self, plugin: TransformerEnginePrecision) -> None:
        """Take over the settings of `plugin`.

        Raises:
            ConfigError: it is to replace layers, or its recipe is not supported here.
        """
        if plugin.replace_layers:
            raise ConfigError(
                "TransformerEnginePrecision has replace_layers=True, but TransformerEngine's modules cannot be "
                "captured; pass replace_layers=False: the model's own linears compute in fp8."
            )
        super().__init__(
            weights_dtype=plugin.weights_dtype,
            recipe=plugin.recipe,
            replace_layers=False,
            fallback_compute_dtype=plugin.fallback_compute_dtype,
        )
        self.fp8 = config_of(self.recipe)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.weights_dtype)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """Enter Lightning's contexts, without TransformerEngine's: the model has none of its modules."""
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        stack = ExitStack()
        stack.enter_context(self.tensor_init_context())
        stack.enter_context(torch.autocast(device_type, dtype=self.fallback_compute_dtype))
        return stack


def taken_over(precision: Precision) -> Precision:
    """Return the plugin to use for `precision`: itself, or its adapter for captured models."""
    refuse_unsupported(precision)
    if isinstance(precision, CapturedTransformerEngine):
        return precision
    if isinstance(precision, TransformerEnginePrecision):
        return CapturedTransformerEngine(precision)
    return precision


def fp8_of(precision: Precision, configured: Fp8Config | None) -> Fp8Config | None:
    """Return the fp8 settings, of the strategy or of the precision plugin.

    Raises:
        ConfigError: the two ask for different things.
    """
    if not isinstance(precision, CapturedTransformerEngine):
        return configured
    if configured is None:
        return precision.fp8
    found = difference(recipe_of(precision.fp8), recipe_of(configured))
    if found is None and configured.backend == "torch":
        found = ("backend", "transformer_engine", "torch")
    if found is not None:
        key, asked, ours = found
        raise ConfigError(
            f"the precision plugin TransformerEnginePrecision asks for {key}={asked!r}, but fp8.{key} is {ours!r}; "
            "make the two the same, or keep fp8 and use precision='bf16-true'.",
            key=f"fp8.{key}",
        )
    return replace(configured, backend="transformer_engine")
