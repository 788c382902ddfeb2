"""Makes examples of documents: two samples of a pair, or one sample that is desirable or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thunder_memsave.finetune.data.counting import Counting
from thunder_memsave.finetune.data.documents import Document
from thunder_memsave.finetune.data.tokenize import IGNORED, Counts, Sample, Tokens, tokenized
from thunder_memsave.settings.problems import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleKind:
    """What the examples of a loss consist of."""

    num_samples: int
    """Samples of each example: 2 of a pair, else 1."""

    trains_prompts: bool = False
    """Whether the prompts of chosen samples are targets too."""

    has_mismatched: bool = False
    """Whether each example has a mismatched sample."""


KINDS: Mapping[str, ExampleKind] = {
    "dpo": ExampleKind(num_samples=2),
    "orpo": ExampleKind(num_samples=2, trains_prompts=True),
    "kto": ExampleKind(num_samples=1, has_mismatched=True),
}
"""The kinds by `preference.loss`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """What a loss of preferences is the mean of."""

    samples: tuple[Sample, ...]
    """Chosen and rejected, or one alone; targets are `IGNORED` in prompts."""

    is_desirable: bool = True
    """Whether a single sample is desirable."""

    mismatched: Sample | None = None
    """A single sample's prompt with the completion of another example, for KTO's reference point."""

    @property
    def length(self) -> int:
        """Tokens that it takes in a row: of all samples, or of the mismatched one if that is longer."""
        mismatched = 0 if self.mismatched is None else len(self.mismatched)
        return max(sum(map(len, self.samples)), mismatched)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """The examples of a data set, and counts of what did not fit."""

    examples: list[Example]
    counts: Counts
    num_left_out: int
    """Examples of which a text has nothing to train on."""


def pairs(documents: Sequence[Document], tokenizer: Any, *, longest: int, name: str) -> Examples:
    """Tokenize pairs.

    Args:
        documents: Each with a rejected one.
        tokenizer: A fast tokenizer of transformers.
        longest: Tokens of one text; what is beyond is cut off.
        name: Name of the data set, for messages.

    Raises:
        ConfigError: a document is no pair; or as `tokenized` does.
    """
    for document in documents:
        if document.rejected is None:
            raise ConfigError(
                f"{document.origin}: preference.loss needs pairs, but the row has no 'chosen' and 'rejected'; give "
                "such rows, or train with preference.loss: kto on rows with a 'label'.",
                key="preference.loss",
            )
    each_text = (text for d in documents for text in (d, d.rejected) if text is not None)
    samples, counts = _samples(each_text, tokenizer, 2 * len(documents), longest, name)
    both = list(zip(samples[::2], samples[1::2], strict=True))
    kept = [Example(samples=(a, b)) for a, b in both if a is not None and b is not None]
    return Examples(examples=kept, counts=counts, num_left_out=len(both) - len(kept))


def labelled(documents: Sequence[Document], tokenizer: Any, *, longest: int, name: str) -> Examples:
    """Tokenize texts that are desirable or not; a pair is one of each. Arguments and errors are those of `pairs`."""
    texts: list[tuple[Document, bool]] = []
    for document in documents:
        if document.rejected is not None:
            texts += [(document, True), (document.rejected, False)]
        elif document.label is None:
            raise ConfigError(
                f"{document.origin}: preference.loss is kto, but the row has no 'label' that is true or false, and is "
                "no pair; add one to every row.",
                key="preference.loss",
            )
        else:
            texts.append((document, document.label))
    samples, counts = _samples((d for d, _ in texts), tokenizer, len(texts), longest, name)
    kept = [(s, is_good) for s, (_, is_good) in zip(samples, texts, strict=True) if s is not None]
    examples = [
        # Before the first comes the last.
        Example(
            samples=(sample,),
            is_desirable=is_desirable,
            mismatched=_mismatched(sample, kept[index - 1][0], longest),
        )
        for index, (sample, is_desirable) in enumerate(kept)
    ]
    return Examples(examples=examples, counts=counts, num_left_out=len(texts) - len(kept))


def _samples(
    documents: Iterator[Document], tokenizer: Any, total: int, longest: int, name: str
) -> tuple[list[Sample | None], Counts]:
    """Return the sample of each document; None: nothing in it has a loss."""
    counts, counting = Counts(), Counting(f"tokenizing the {name} documents", total=total)
    samples: list[Sample | None] = []
    for each in tokenized(
        documents, tokenizer, max_seq_length=longest, assistant_only=True, continue_long=False
    ):
        counts.add(each)
        counting.add(1)
        samples.append(each.samples[0] if each.samples else None)
    return samples, counts


def _mismatched(sample: Sample, other: Sample, longest: int) -> Sample:
    """Join the prompt of one sample and the completion of another."""
    prompt, completion = _prompt_and_completion(sample)[0], _prompt_and_completion(other)[1]
    tokens = np.concatenate([prompt, completion])
    targets = np.full(len(tokens), IGNORED, dtype=np.int32)
    first = max(len(prompt) - 1, 0)
    targets[first:-1] = tokens[first + 1 :]
    return Sample(input_ids=tokens[:longest], targets=targets[:longest])


def _prompt_and_completion(sample: Sample) -> tuple[Tokens, Tokens]:
    """Cut a sample after the last token that is not trained on."""
    tokens, is_trained = sample.input_ids, np.zeros(len(sample), bool)
    is_trained[1:] = sample.targets[:-1] != IGNORED
    if sample.targets[-1] != IGNORED:  # a token that is beyond the sample's end
        tokens = np.append(tokens, sample.targets[-1])
        is_trained = np.append(is_trained, True)
    (others,) = np.nonzero(~is_trained)
    cut = int(others[-1]) + 1 if len(others) else 0
    return tokens[:cut], tokens[cut:]
