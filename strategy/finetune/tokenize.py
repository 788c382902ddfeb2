"""Turns documents into token rows of at most one length, with the target of every position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_memsave.finetune.documents import Document
from thunder_memsave.settings import ConfigError

IGNORED = -100
"""Target of a position that does not count in the loss; torch's default `ignore_index`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A document's tokens, or as many of them as fit into a row."""

    input_ids: list[int]
    targets: list[int]
    """The token that position i is to predict (`input_ids[i + 1]`), or `IGNORED`."""

    @property
    def num_targets(self) -> int:
        """Count the positions that count in the loss."""
        return sum(target != IGNORED for target in self.targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedData:
    """All samples of a set, and what did not fit."""

    samples: list[Sample]
    num_documents: int
    num_truncated: int
    num_without_targets: int
    """Documents that are left out: nothing in them counts in the loss."""


def tokenize(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    max_seq_length: int,
    assistant_only: bool,
    continue_long: bool,
) -> TokenizedData:
    """Tokenize each document as a whole and mark the tokens that are trained on.

    Args:
        documents: What to tokenize.
        tokenizer: A fast transformers tokenizer: which token stems from which character decides
            what is trained on, because tokenizing the parts one by one gives other tokens.
        max_seq_length: Longest sample.
        assistant_only: Train on the parts marked `assistant`, and on the end after them.
        continue_long: Make several samples of a long document, instead of cutting it.

    Raises:
        ConfigError: the tokenizer is not a fast one, or no document has anything to train on.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} is not a fast tokenizer; the model's directory needs a "
            "tokenizer.json."
        )
    samples: list[Sample] = []
    num_truncated = num_without_targets = 0
    for document in documents:
        whole = _tokenize_document(document, tokenizer, assistant_only=assistant_only)
        # The last position has no token to predict, so one more token than a row fits.
        is_long = len(whole.input_ids) > max_seq_length + 1
        pieces = list(_pieces(whole, max_seq_length))
        pieces = pieces if continue_long else pieces[:1]
        useful = [piece for piece in pieces if piece.num_targets]
        num_truncated += is_long and not continue_long
        num_without_targets += not useful
        samples += useful
    if not samples:
        raise ConfigError(
            f"none of the {len(documents)} documents has a token to train on within "
            f"data.max_seq_length ({max_seq_length}); look at data.train_on and the data."
        )
    return TokenizedData(
        samples=samples,
        num_documents=len(documents),
        num_truncated=num_truncated,
        num_without_targets=num_without_targets,
    )


def _tokenize_document(document: Document, tokenizer: Any, *, assistant_only: bool) -> Sample:
    text = "".join(part.text for part in document.parts)
    encoded = tokenizer(
        text,
        add_special_tokens=not document.rendered,
        return_offsets_mapping=True,
        verbose=False,  # its warning about the model's length; rows are cut here
    )
    ids = list(encoded["input_ids"])
    trained = _trained(document, encoded["offset_mapping"], assistant_only=assistant_only)
    eos = tokenizer.eos_token_id
    if not document.rendered and eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
        trained.append(document.parts[-1].assistant or not assistant_only)
    targets = [
        token if is_trained else IGNORED
        for token, is_trained in zip(ids[1:], trained[1:], strict=True)
    ]
    return Sample(input_ids=ids, targets=[*targets, IGNORED])


def _trained(
    document: Document, offsets: Sequence[tuple[int, int]], *, assistant_only: bool
) -> list[bool]:
    """Mark each token that holds a character to train on; a token without text is not trained."""
    if not assistant_only:
        return [True] * len(offsets)
    spans, start = [], 0
    for part in document.parts:
        end = start + len(part.text)
        if part.assistant:
            spans.append((start, end))
        start = end
    return [any(first < end and last > start for start, end in spans) for first, last in offsets]


def _pieces(whole: Sample, length: int) -> Iterator[Sample]:
    """Cut into samples; each position keeps its target, also the last one of a piece."""
    # The final token predicts nothing: it gets no piece of its own, but stays where it fits.
    for start in range(0, max(len(whole.input_ids) - 1, 1), length):
        end = start + length
        yield Sample(input_ids=whole.input_ids[start:end], targets=whole.targets[start:end])
