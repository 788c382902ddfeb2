"""Attention's kernels see what a mask means: causal ones and those of packed rows are not made, others stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thunder.core.proxies import TensorProxy
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from harness.language_model import TINY_DECODER
from harness.parity import Twins, weighted_sum
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.ops.families.packed_attention import boundaries_of, packed_mask

LENGTH = 12


def model_of(model_type: str, **values: Any) -> nn.Module:
    set_seed(0)
    architecture = AutoConfig.for_model(model_type, **{**TINY_DECODER, **values})
    model: nn.Module = AutoModelForCausalLM.from_config(architecture)
    return model


def calls(twins: Twins) -> list[tuple[str, bool, bool]]:
    """Name forward's attention operators; whether each has a mask, and whether it is causal."""
    found = []
    for bsym in twins.compiled.captures[-1].forward_traces[-1].bound_symbols:
        if "attention" in bsym.sym.name:
            dropout_and_causal = bsym.args[3:5]
            mask = bsym.kwargs.get("attn_mask")
            is_causal = dropout_and_causal[1:] == (True,)
            found.append((bsym.sym.name, isinstance(mask, TensorProxy), is_causal))
    return found


def squares(twins: Twins, length: int = LENGTH) -> set[str]:
    compiled = twins.compiled.captures[-1]
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    proxies = (p for t in traces for b in t.bound_symbols for p in b.flat_proxy_outs)
    return {
        p.name for p in proxies if isinstance(p, TensorProxy) and p.shape[-2:] == (length, length)
    }


FLASH = "aten_scaled_dot_product_flash_attention_for_cpu"
CAUSAL = (FLASH, False, True)
MASKED = (FLASH, True, False)


@pytest.mark.parametrize(
    ("model_type", "values", "expected"),
    [
        ("llama", {}, [CAUSAL, CAUSAL]),
        ("gpt2", {}, [CAUSAL, CAUSAL]),
        ("mistral", {"sliding_window": LENGTH}, [CAUSAL, CAUSAL]),
        ("mistral", {"sliding_window": 5}, [MASKED, MASKED]),
        (
            "gemma3_text",
            {
                "head_dim": 8,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [MASKED, CAUSAL],
        ),
    ],
    ids=["llama", "gpt2", "window as long as a row", "window", "gemma"],
)
def test_full_attention_has_no_mask_and_a_window_has_one(
    model_type: str,
    values: dict[str, Any],
    expected: list[tuple[str, bool, bool]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="thunder_memsave.frontend.rewrites.attention_masks")
    twins = Twins(model_of(model_type, **values).eval())
    ids = torch.randint(4, 60, (2, LENGTH))
    twins.assert_equal(
        input_ids=ids,
        use_cache=False,
        loss=lambda output: weighted_sum(output.logits),
        atol=1e-5,
    )
    assert calls(twins) == expected
    assert bool(squares(twins)) is (MASKED in expected)
    windows = [m for m in caplog.messages if "its window of 5 positions is a kernel's only on" in m]
    for layer, kind in enumerate(expected):
        said = f"layers.{layer}.self_attn" in "".join(windows)
        assert said is (kind == MASKED)


def test_keys_and_values_of_grouped_queries_are_not_repeated() -> None:
    twins = Twins(model_of("llama"))
    twins.assert_equal(
        input_ids=torch.randint(4, 60, (2, LENGTH)),
        use_cache=False,
        loss=lambda output: weighted_sum(output.logits),
        atol=1e-5,
    )
    attention = [
        bsym
        for bsym in twins.compiled.captures[-1].forward_traces[-1].bound_symbols
        if bsym.sym.name == FLASH
    ]
    assert {tuple(b.args[1].shape) for b in attention} == {(2, 2, LENGTH, 8)}


def test_a_mask_of_padding_stays() -> None:
    twins = Twins(model_of("llama"))
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, -3:] = 0
    twins.assert_equal(
        input_ids=torch.randint(4, 60, (2, LENGTH)), attention_mask=padding, use_cache=False
    )
    assert calls(twins) == [MASKED, MASKED]


class Masked(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        heads = x * self.scale
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.mask(x))


def _past(x: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()


def _past_by_numbers(x: Tensor) -> Tensor:
    positions = torch.arange(LENGTH, device=x.device)
    return (positions[None] <= positions[:, None]) & (positions[None] >= 0)


def _changed(x: Tensor) -> Tensor:
    mask = _past(x)
    mask[:, 0] = False
    mask[0, 0] = True
    return mask


def _future_too(x: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril(1)


def _of_the_input(x: Tensor) -> Tensor:
    return _past(x) & (x.detach()[0, 0].sum() > -1e9)


def _added(x: Tensor) -> Tensor:
    return torch.zeros(LENGTH, LENGTH).masked_fill(~_past(x), float("-inf"))


@pytest.mark.parametrize("mask", [_past, _past_by_numbers])
def test_a_causal_mask_is_recognised_by_its_values(mask: Callable[[Tensor], Tensor]) -> None:
    twins = Twins(Masked(mask))
    twins.assert_equal(torch.randn(2, 3, LENGTH, 8), loss=weighted_sum)
    assert calls(twins) == [CAUSAL]
    assert not squares(twins)


@pytest.mark.parametrize("mask", [_changed, _future_too, _of_the_input, _added])
def test_any_other_mask_stays(mask: Callable[[Tensor], Tensor]) -> None:
    twins = Twins(Masked(mask))
    twins.assert_equal(torch.randn(2, 3, LENGTH, 8), loss=weighted_sum)
    assert calls(twins) == [MASKED]


def test_a_causal_mask_of_more_keys_than_queries_stays() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, keys: Tensor) -> Tensor:
            mask = torch.ones(4, LENGTH, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(x * self.scale, keys, keys, attn_mask=mask)

    twins = Twins(Cached())
    twins.assert_equal(torch.randn(1, 2, 4, 8), torch.randn(1, 2, LENGTH, 8), loss=weighted_sum)
    assert calls(twins) == [MASKED]


class Packed(nn.Module):
    """Attention under the mask of packed rows, as `use` reads it."""

    def __init__(self, use: Callable[[Tensor], Tensor] = lambda mask: mask, dropout: float = 0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.use, self.dropout = use, dropout

    def forward(self, x: Tensor, boundaries: Tensor) -> Tensor:
        mask = self.use(packed_mask(boundaries, x.shape[0], x.shape[2]))
        heads = x * self.scale
        return F.scaled_dot_product_attention(heads, heads, heads, mask, self.dropout)


def packed(*ends: list[int]) -> Tensor:
    return boundaries_of(torch.tensor(ends, dtype=torch.int32), LENGTH)


def test_the_mask_of_packed_rows_gives_way_to_its_boundaries() -> None:
    twins, x = Twins(Packed()), torch.randn(2, 3, LENGTH, 8, dtype=torch.float64)
    full = packed([3, 7, LENGTH], [LENGTH, LENGTH, LENGTH])
    twins.assert_equal(x, full, loss=weighted_sum)
    # fewer documents, of other lengths, by the same capture
    twins.assert_equal(x, packed([1, LENGTH, LENGTH], [5, 6, LENGTH]), loss=weighted_sum)
    assert twins.num_captures == 1
    names = [b.sym.name for b in twins.compiled.captures[0].forward_traces[-1].bound_symbols]
    assert "cpu_packed_attention" in names
    assert not squares(twins)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9),
        lambda mask: mask & mask,
    ],
    ids=["added", "combined"],
)
def test_a_mask_of_packed_rows_that_is_used_in_another_way_is_made(
    use: Callable[[Tensor], Tensor],
) -> None:
    twins, x = Twins(Packed(use)), torch.randn(2, 3, LENGTH, 8, dtype=torch.float64)
    twins.assert_equal(x, packed([3, 7, 9], [8, LENGTH, LENGTH]), loss=weighted_sum)
    assert calls(twins) == [MASKED]


def test_where_no_kernel_takes_the_operands_packed_rows_have_a_mask_of_the_same_meaning() -> None:
    torch.manual_seed(0)
    model = Packed(dropout=1e-12)  # no weight is dropped, but kernels do not take it
    twins, x = Twins(model), torch.randn(2, 3, LENGTH, 8, dtype=torch.float64)
    twins.assert_equal(x, packed([3, 7, 9], [8, LENGTH, LENGTH]), loss=weighted_sum)
    names = [b.sym.name for b in twins.compiled.captures[0].forward_traces[-1].bound_symbols]
    assert "cpu_packed_attention" not in names


class Shared(nn.Module):
    """One mask of a single element, for one key and for many."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        everything = torch.ones(1, 1, dtype=torch.bool)
        attend = F.scaled_dot_product_attention
        first = attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], attn_mask=everything)
        return first + attend(q, k, v, attn_mask=everything)


class OneQueryHead(nn.Module):
    """Two heads of keys, each twice, for one head of queries that is meant for all."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (t[:, :, None].expand(2, 2, 2, 8, 8).reshape(2, 4, 8, 8) for t in (k, v))
        return F.scaled_dot_product_attention(q, keys, values)


@pytest.mark.parametrize(("model", "num_heads"), [(Shared(), (2, 2)), (OneQueryHead(), (1, 2))])
def test_what_only_looks_like_a_causal_mask_or_grouped_queries_is_as_in_eager(
    model: nn.Module, num_heads: tuple[int, int]
) -> None:
    of_queries, of_keys = num_heads
    q = torch.randn(2, of_queries, 8, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, of_keys, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(CompiledModule(model)(q, k, v), model(q, k, v))
