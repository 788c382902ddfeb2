"""Small models that write in place: five as people write them, four of transformers, and any number drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models import VOCAB_SIZE, token_batch

BATCH, LENGTH, WIDTH = 2, 6, 8


class Residual(nn.Module):
    """Adds in place to a linear's three-dimensional result, as Falcon and DeBERTa do."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for linear in self.linears:
            h = F.linear(x, cast(nn.Linear, linear).weight)
            h += x
            x = F.dropout(torch.sin(h), 0.1)
        return (x.square().mean(),)


class Activations(nn.Module):
    """Runs dropout and activations in place, one after the other, as vision models do."""

    def __init__(self) -> None:
        super().__init__()
        kinds: tuple[Callable[[], nn.Module], ...] = (
            lambda: nn.ReLU(inplace=True),
            lambda: nn.SiLU(inplace=True),
            lambda: nn.Hardswish(inplace=True),
        )
        self.layers = nn.Sequential()
        for kind in kinds:
            # In this order: a gradient of ReLU needs its result, over which dropout would have written.
            self.layers.extend([nn.Linear(WIDTH, 2 * WIDTH), nn.Dropout(0.2, inplace=True), kind()])
            self.layers.append(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x).square().mean(),)


class Scores(nn.Module):
    """Changes scores by masks and slices before their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for _ in range(3):
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            scores.mul_(0.5)
            scores.masked_fill_(scores > 1.0, 0.25)
            scores[:, 0] = 0.0
            x = F.dropout(scores.softmax(-1), 0.1) @ x
        return (x.square().mean(),)


class Views(nn.Module):
    """Writes through views: a flat one, and one with two dimensions swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for _ in range(3):
            h = F.silu(self.up(x).view(-1, 3 * WIDTH), inplace=True).view(BATCH, LENGTH, -1)
            y = self.down(F.dropout(h, 0.1)).transpose(0, 1)
            y.add_(x.transpose(0, 1))
            x = y.transpose(0, 1)
        return (x.square().mean(),)


class Counted(nn.Module):
    """Writes to a buffer that it reads, to statistics, and to its own results."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for linear in self.linears:
            # No gradient needs the buffer, which is written to next.
            h = linear((x + self.seen).sin())
            self.seen.add_(1.0)
            h.clamp_(-1.0, 1.0).mul_(x.sigmoid())
            x = F.dropout(self.norm(h), 0.1, inplace=True)
        return (x.square().mean(),)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a residual": Residual,
    "activations": Activations,
    "scores": Scores,
    "views": Views,
    "a counter": Counted,
}


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}


class Language(nn.Module):
    """A model of transformers that returns what it computes of tokens as a tuple, and first its loss."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(input_ids=ids, labels=ids)
        return output.loss, output.logits


def _deberta() -> Language:
    settings: dict[str, Any] = {
        **_SIZES,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_buckets": 16,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    config = transformers.DebertaV2Config(**settings)
    return Language(transformers.DebertaV2ForMaskedLM(config))


def _falcon(*, alibi: bool) -> Language:
    config = transformers.FalconConfig(
        **_SIZES,
        alibi=alibi,
        bias=alibi,
        parallel_attn=not alibi,
        new_decoder_architecture=False,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return Language(transformers.FalconForCausalLM(config))


def _gpt_oss() -> Language:
    settings: dict[str, Any] = {
        **_SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_dropout": 0.1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings))
    model.set_experts_implementation("batched_mm")
    return Language(model)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "deberta": _deberta,
    "falcon with alibi": partial(_falcon, alibi=True),
    "falcon": partial(_falcon, alibi=False),
    "gpt_oss": _gpt_oss,
}
"""They add in place to what a linear has made, or their experts' results are written where they belong."""


def batch(model: nn.Module) -> Tensor:
    """What to call it with."""
    if isinstance(model, Language):
        return token_batch(4, 32)
    return torch.randn(BATCH, LENGTH, WIDTH)


# Each changes `{c}`, which is new, given another value of the same shape.
_CHANGES = (
    "{c} += {b}",
    "{c}.add_({b}, alpha=0.5)",
    "{c}.mul_({b}.sigmoid())",
    "{c}.mul_({c}.sigmoid())",
    "{c}.clamp_(-0.5, 0.5)",
    "{c}[:, 0] = 0.25",
    "{c}[:, 1:3] = {b}[:, :2]",
    "{c}.masked_fill_({b} > 0.1, 0.25)",
    "{c} = F.relu({c}, inplace=True)",
    "F.silu({c}, inplace=True)",
    "{c} = F.dropout({c}, 0.5, True, True)",
    "{c} = F.mish({c}.reshape(-1, 8), True).reshape(2, 6, 8)",
    "{c}.copy_({b})",
    "{c} -= {b}",
)
_FRESH = (
    "F.linear({a}, self.weight)",
    "F.linear({a}, self.weight, self.bias)",
    "{a} * 1.5",
    "torch.sin({a})",
    "F.linear({a}.transpose(0, 1), self.weight).transpose(0, 1)",
)
_PLAIN = (
    "{c} = F.gelu({a})",
    "{c} = F.dropout({a}, 0.5)",
    "{c} = {a} * torch.tanh({b})",
    "{c} = F.softmax({a} + {b}, -1)",
    "{c} = {a} * self.seen; self.seen.add_(1.0)",
)


class Drawn(nn.Module):
    """A weight, a bias, and a buffer that forward may write to."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 2)
        self.register_buffer("seen", torch.ones(()))
        self._forward = forward

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self._forward(self, x),)


def source(seed: int, *, num_values: int = 7) -> str:
    """Return the source of `run(self, x)`."""
    draw = random.Random(seed)
    lines, pool = ["y = F.linear(x, self.weight)"], ["x", "y"]
    for number in range(num_values):
        names = {"a": draw.choice(pool[-3:]), "b": draw.choice(pool), "c": f"v{number}"}
        if draw.random() < 0.3:
            lines.append(draw.choice(_PLAIN).format(**names))
        else:
            changes = draw.choices(_CHANGES, k=draw.choice([1, 1, 2, 3]))
            lines += [f"v{number} = {draw.choice(_FRESH).format(**names)}"]
            lines += [change.format(**names) for change in changes]
        pool.append(f"v{number}")
    body = "\n    ".join([*lines, f"return ({pool[-1]} * y + {pool[-2]}).square().mean()"])
    return f"def run(self, x):\n    {body}\n"


def drawn(seed: int) -> nn.Module:
    """Build the model of a seed."""
    scope: dict[str, object] = {"torch": torch, "F": F}
    exec(compile(source(seed), f"in place {seed}", "exec"), scope)
    return Drawn(scope["run"])  # type: ignore[arg-type]
