"""Takes prompts, and the answers that are expected, from the samples of a data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thunder_memsave.finetune.data.packing import Rows
from thunder_memsave.finetune.data.preferences.rows import PreferenceRows
from thunder_memsave.finetune.data.tokenize import IGNORED, Sample

_MOST_OF_TEXT = 64
"""Most tokens of a prompt that is the beginning of a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a model is asked to go on with."""

    tokens: list[int]
    expected: list[int]
    """The answer in the data; of a pair, the chosen one."""


def prompts_of(rows: Rows | PreferenceRows, count: int) -> list[Prompt]:
    """Return the prompts of the first samples, at most `count`; a sample without a target has none."""
    if isinstance(rows, PreferenceRows):
        examples = (rows.examples[i] for i in range(min(count, len(rows.examples))))
        samples = [example.samples[0] for example in examples]
    else:
        samples = [rows.samples[i] for i in range(min(count, len(rows.samples)))]
    return [prompt for sample in samples if (prompt := _prompt_of(sample)) is not None]


def _prompt_of(sample: Sample) -> Prompt | None:
    """Cut a sample before what is trained on; a text that is trained on from its beginning, after a quarter."""
    is_trained = sample.targets != IGNORED
    if not is_trained.any():
        return None
    first = int(np.argmax(is_trained))
    if first == 0:
        first = max(0, min(len(sample) // 4, _MOST_OF_TEXT) - 1)
    ignored = np.flatnonzero(~is_trained[first:])
    end = first + int(ignored[0]) if len(ignored) else len(sample)
    return Prompt(
        tokens=sample.input_ids[: first + 1].tolist(), expected=sample.targets[first:end].tolist()
    )
