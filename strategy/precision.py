"""Which of Fabric's precision plugins work, and what one needs when gradients are sharded."""

from __future__ import annotations

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
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from thunder_memsave.config import ConfigError

_SUPPORTED = "32-true, 64-true, bf16-true, 16-true, bf16-mixed and 16-mixed"
_REFUSED: dict[type[Precision], str] = {
    TransformerEnginePrecision: "fp8 support is not there in this version",
    BitsandbytesPrecision: "weights quantized by bitsandbytes cannot be captured",
    FSDPPrecision: "it configures torch's FSDP, which this strategy does not use",
    DeepSpeedPrecision: "it configures DeepSpeed, which this strategy does not use",
    XLAPrecision: "XLA devices are not supported",
}


def refuse_unsupported(precision: Precision) -> None:
    """Refuse a precision plugin that does not work with this strategy.

    Raises:
        ConfigError: names the plugin, the reason and the supported ones.
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
        ConfigError: the scaler is of the user's own type, which cannot be replaced.
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
