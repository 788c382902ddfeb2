"""A captured `nn.TransformerEncoder` gives padding other numbers than an eager one in evaluation.

In evaluation, eager takes the words alone into a nested tensor if the padding is at the end of every row, and the
result has zeros where the padding is. While it is compiled it computes the padding too, by a branch on
`torch.compiler.is_compiling()` (torch/nn/modules/transformer.py): words are the same, a mean over all positions is not.

Delete this file when `tests/compat/test_padded_encoders.py` says that both are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_upstream = nn.TransformerEncoder.forward


def upstream() -> Callable[..., Tensor]:
    """Return PyTorch's own `forward`."""
    return _upstream


def apply() -> None:
    """Give padding the numbers that it has in eager, while an encoder is captured."""

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        output = _upstream(self, src, mask, src_key_padding_mask, is_causal)
        if src_key_padding_mask is None or not torch.compiler.is_compiling():
            return output
        return _blank(self, output, src_key_padding_mask) if _nests(self, src, mask) else output

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]


def _nests(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None) -> bool:
    """Return whether eager leaves padding out, if it is at the end of every row."""
    layer = encoder.layers[0]
    trained = (src, *layer.parameters())
    return (
        encoder.use_nested_tensor
        and encoder.mask_check
        and torch.backends.mha.get_fastpath_enabled()
        and not layer.training
        and src.dim() == 3
        and mask is None
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in trained))
    )


def _blank(encoder: nn.TransformerEncoder, output: Tensor, padding: Tensor) -> Tensor:
    """Return (B, L, E) with zeros, after the last norm, at the padding (B, L), if it is at the end of every row."""
    is_word = padding.logical_not()  # a mask that is added has zeros for words
    at_the_end = (is_word[:, 1:] <= is_word[:, :-1]).all()
    zeros = torch.zeros_like(output)
    zeros = zeros if encoder.norm is None else encoder.norm(zeros)
    return torch.where((at_the_end & ~is_word).unsqueeze(-1), zeros, output)
