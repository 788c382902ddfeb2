"""Shows a sample as text, with marks around the tokens that the loss counts."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from thunder_memsave.finetune.data.tokenize import IGNORED, Sample

TRAINED_FROM, TRAINED_TO = "⟦", "⟧"


def describe_sample(sample: Sample, tokenizer: Any, *, max_tokens: int = 512) -> str:
    """Decode a sample, special tokens included, with the trained tokens in `⟦ ⟧`.

    Plain text over several lines, in which `thunder-memsave validate` shows
    `PreparedData.example`. A sample that continues in the next row ends with that row's first
    token, because its last position is trained to predict it.

    Args:
        sample: A sample of `prepare_data`.
        tokenizer: The tokenizer that made it.
        max_tokens: Number of tokens to show; if some are left out, the text says so.
    """
    # Position i predicts token i + 1, so the position before a token decides whether it is trained.
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
