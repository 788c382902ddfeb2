"""Calls of operations, among them every one that has a row in the table, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thunder_memsave.ops.families.packed_attention import boundaries_of, packed_attention

ROWS, COLUMNS = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One call."""

    run: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = ((ROWS, COLUMNS),)
    """Of its arguments, all of which get gradients."""
    of: str = ""
    """Name of its row in the table; empty: it has none."""
    kernel: str = ""
    """That of ours which runs on the CPU; empty: none of ours."""


HEADS = (2, 3, ROWS, COLUMNS)
NORM = ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,))


def _heads(*shape: int, num: int = 3) -> tuple[tuple[int, ...], ...]:
    return (shape or HEADS,) * num


def _attention(**options: object) -> Callable[..., Tensor]:
    return lambda *heads: F.scaled_dot_product_attention(*heads, **options)  # type: ignore[arg-type]


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    allowed = torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, allowed)


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = torch.tensor([[1, 3, 3], [4, 4, 4]], dtype=torch.int32, device=q.device)
    return packed_attention(q, k, v, boundaries_of(ends, ROWS), enable_gqa=True)


def _classes(x: Tensor) -> Tensor:
    return torch.arange(ROWS, device=x.device)


def _in_other_grad_modes(x: Tensor) -> Tensor:
    with torch.no_grad():
        constant = x * 2
    return x * constant


def _index_put(x: Tensor) -> Tensor:
    return x.index_put((torch.tensor([1], device=x.device),), torch.zeros((), dtype=x.dtype))


def _kernel(of: str, run: Callable[..., Tensor]) -> Sample:
    return Sample(of=of, run=run, kernel=f"{of}_kernel")


SAMPLES: Mapping[str, Sample] = {
    "attention": Sample(of="attention", run=_attention(is_causal=True), shapes=_heads()),
    "attention_with_a_mask": Sample(of="attention", run=_masked, shapes=_heads()),
    "attention_of_blocks": Sample(
        of="attention",
        run=_attention(scale=0.3),
        shapes=_heads(1, 1, 600, COLUMNS),
    ),
    "attention_of_grouped_queries": Sample(
        of="attention",
        run=_attention(is_causal=True, enable_gqa=True),
        shapes=((2, 4, ROWS, COLUMNS), *_heads(2, 2, ROWS, COLUMNS, num=2)),
    ),
    "packed_attention": Sample(
        of="packed_attention", run=_packed, shapes=_heads(), kernel="cpu_packed_attention"
    ),
    "packed_attention_of_grouped_queries": Sample(
        of="packed_attention",
        run=_packed,
        shapes=((2, 4, ROWS, COLUMNS), *_heads(2, 2, ROWS, COLUMNS, num=2)),
        kernel="cpu_packed_attention",
    ),
    "attention_without_heads": Sample(
        of="attention", run=_attention(is_causal=True), shapes=_heads(2, ROWS, COLUMNS)
    ),
    "attention_with_a_trained_mask": Sample(
        of="attention",
        run=lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        shapes=(*_heads(), (ROWS, ROWS)),
    ),
    "cross_entropy": Sample(run=lambda x: F.cross_entropy(x, _classes(x))),
    "nll_loss": Sample(run=lambda x: F.nll_loss(F.log_softmax(x, -1), _classes(x))),
    "cross_entropy_of_rows": Sample(
        run=lambda x: F.cross_entropy(x, _classes(x), reduction="none")
    ),
    "cross_entropy_smoothed": Sample(
        run=lambda x: F.cross_entropy(x, _classes(x), label_smoothing=0.1)
    ),
    "gelu": Sample(run=F.gelu),
    "gelu_tanh": Sample(run=lambda x: F.gelu(x, approximate="tanh")),
    "silu": Sample(run=F.silu),
    "relu": Sample(run=F.relu),
    "tanh": Sample(run=torch.tanh),
    "sigmoid": Sample(run=torch.sigmoid),
    "softmax": Sample(run=lambda x: F.softmax(x, dim=-1)),
    "softmax_of_columns": Sample(run=lambda x: F.softmax(x, dim=0)),
    "softmax_in_fp32": Sample(run=lambda x: F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)),
    "layer_norm": Sample(run=lambda x: F.layer_norm(x, (COLUMNS,))),
    "layer_norm_of_two": Sample(run=lambda x: F.layer_norm(x, (ROWS, COLUMNS), eps=1e-3)),
    "layer_norm_with_parameters": Sample(
        run=lambda x, weight, bias: F.layer_norm(x, (COLUMNS,), weight, bias),
        shapes=NORM,
    ),
    "rms_norm": _kernel("rms_norm", lambda x: F.rms_norm(x, (COLUMNS,))),
    "rms_norm_of_two": _kernel("rms_norm", lambda x: F.rms_norm(x, (ROWS, COLUMNS), eps=1e-3)),
    "rms_norm_with_weight": Sample(
        of="rms_norm",
        run=lambda x, weight: F.rms_norm(x, (COLUMNS,), weight, 1e-6),
        shapes=NORM[:2],
        kernel="rms_norm_kernel",
    ),
    "rms_norm_module": _kernel("rms_norm", nn.RMSNorm(COLUMNS, elementwise_affine=False)),
    "embedding": Sample(run=lambda x: F.embedding(_classes(x), x)),
    "index_put": Sample(run=_index_put),
    "unfold": Sample(run=lambda x: x.unfold(-1, 3, 2)),
    "no_grad": Sample(run=_in_other_grad_modes),
    "detach": Sample(run=lambda x: x * x.detach()),
    "data": Sample(run=lambda x: x * x.data),
    "T": Sample(run=lambda x: x.T),
    "mT": Sample(run=lambda x: x.mT @ x),
    "cat": Sample(run=lambda x: torch.cat([torch.tensor([], dtype=x.dtype), x, x], dim=-1)),
    "cat_by_name": Sample(
        run=lambda x: torch.cat(tensors=[torch.tensor([], dtype=x.dtype), x], dim=-1)
    ),
}


class Samples(nn.Module):
    """Computes samples, each of parameters of its own, times other numbers, which keep nothing of a result."""

    def __init__(self, names: Collection[str], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.values = nn.ModuleDict(
            {
                name: nn.ParameterList(
                    torch.randn(s, dtype=dtype) * 3 for s in SAMPLES[name].shapes
                )
                for name in names
            }
        )

    def forward(self) -> dict[str, Tensor]:
        results = {}
        for name, values in self.values.items():
            assert isinstance(values, nn.ParameterList)
            result = SAMPLES[name].run(*values)
            factors = torch.arange(1, result.numel() + 1, dtype=result.dtype) / result.numel()
            results[name] = result * factors.reshape(result.shape)
        return results
