"""Shows a sample as text, with marks around the tokens that the loss counts."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from thunder_memsave.finetune.data.tokenize import IGNORED, Sample

TRAINED_FROM, TRAINED_TO = "⟦", "⟧"


def describe_sample(sample: Sample, tokenizer: Any, *, max_tokens: int = 512) -> str:
    """Decode a sample, special tokens included; what is trained on stands in `⟦ ⟧`.

    Plain text over several lines, for `thunder-memsave validate`, which shows
    `PreparedData.example` by it. A sample that goes on in the next row ends with that row's first
    token, because its last position is trained to predict it.

    Args:
        sample: One of those that `prepare_data` makes.
        tokenizer: The one that made it.
        max_tokens: How much of it is shown; where the rest is left out, it says so.
    """
    # Position i predicts token i + 1, so a token is trained on by the position before it.
    tokens = [(int(sample.input_ids[0]), False)]
    following = [*map(int, sample.input_ids[1:]), int(sample.targets[-1])]
    for token, target in zip(following, map(int, sample.targets), strict=True):
        if token != IGNORED:
            tokens.append((token, target != IGNORED))
    shown = "".join(
        _run([token for token, _ in run], tokenizer, is_trained=is_trained)
        for is_trained, run in groupby(tokens[:max_tokens], key=lambda pair: pair[1])
    )
    num_hidden = len(tokens) - max_tokens
    return f"{shown} ... and {num_hidden:,} more tokens" if num_hidden > 0 else shown


def _run(tokens: list[int], tokenizer: Any, *, is_trained: bool) -> str:
    text = str(tokenizer.decode(tokens, skip_special_tokens=False))
    return f"{TRAINED_FROM}{text}{TRAINED_TO}" if is_trained else text
