"""Names the formats in which frozen weights can be kept as bytes."""

from typing import Literal

FrozenFormat = Literal["nf4", "int8", "mxfp4"]
"""What `model.frozen_weights` can be."""
BytesFormat = Literal["nf4", "int8", "mxfp4", "mxfp4_transposed"]
"""What the bytes of one weight can be."""


def setting_of(kept_in: BytesFormat) -> FrozenFormat:
    """Return the setting under which a weight is kept so."""
    return "mxfp4" if kept_in == "mxfp4_transposed" else kept_in
