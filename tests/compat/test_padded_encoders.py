"""Padding has eager's numbers in a captured encoder; torch.compile alone gives it others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.compat import padded_encoders
from thunder_memsave.compiler.compiled_module import CompiledModule

# Eager's own, of its nested tensors.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")

AT_THE_END = [[False] * 4, [False, False, True, True]]
ELSEWHERE = [[False] * 4, [True, False, False, True]]


def encoder(*, norm: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if norm else None).eval()


class Padded(nn.Module):
    def __init__(self, padding: Tensor, *, norm: bool) -> None:
        super().__init__()
        self.encoder = encoder(norm=norm)
        self.register_buffer("padding", padding)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x, src_key_padding_mask=self.padding)
        return result


def test_canary_torch_compile_gives_padding_other_numbers() -> None:
    model, x = encoder(), torch.randn(2, 4, 8)
    padding = torch.tensor(AT_THE_END)
    original = padded_encoders.upstream()
    compiled = torch.compile(original, backend="eager")
    with torch.no_grad():
        expected = original(model, x, src_key_padding_mask=padding)
        found = compiled(model, x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding])
    assert expected[padding].abs().max() == 0 < found[padding].abs().max()


@pytest.mark.parametrize("norm", [False, True], ids=["alone", "norm"])
@pytest.mark.parametrize("rows", [AT_THE_END, ELSEWHERE], ids=["at the end", "elsewhere"])
@pytest.mark.parametrize("is_added", [False, True], ids=["bool", "added"])
def test_padding_has_eagers_numbers(rows: list[list[bool]], norm: bool, is_added: bool) -> None:
    padding = torch.tensor(rows)
    if is_added:
        padding = torch.zeros(padding.shape).masked_fill_(padding, float("-inf"))
    model, x = Padded(padding, norm=norm), torch.randn(2, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(CompiledModule(model)(x), model(x))


def test_with_gradients_eager_computes_padding_too() -> None:
    model, x = Padded(torch.tensor(AT_THE_END), norm=True), torch.randn(2, 4, 8)
    torch.testing.assert_close(CompiledModule(model)(x), model(x))
