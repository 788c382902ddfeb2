"""Turns documents into token rows of at most one length, with the target of every position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thunder_memsave.finetune.data.counting import Counting
from thunder_memsave.finetune.data.documents import Document
from thunder_memsave.settings.problems import ConfigError

Tokens: TypeAlias = npt.NDArray[np.int32]

IGNORED = -100
"""Target of a position without loss; torch's default `ignore_index`."""

# A fast tokenizer processes the documents of one call in parallel.
_DOCUMENTS_PER_CALL = 1000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A document's tokens, or a piece that fits into a row: 8 bytes per token."""

    input_ids: Tokens
    targets: Tokens
    """The token that position i predicts (`input_ids[i + 1]`), or `IGNORED`."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Number of positions with a loss."""
        return int(np.count_nonzero(self.targets != IGNORED))


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts of documents, and of what in them did not fit."""

    num_documents: int = 0
    num_targets: int = 0
    num_truncated: int = 0
    num_cut_tokens: int = 0
    """Tokens at the ends of truncated documents that are left out."""
    longest: int = 0
    """Tokens of the longest document, before it is cut."""
    num_without_targets: int = 0
    """Number of documents that are left out, because nothing in them has a loss."""

    def add(self, document: TokenizedDocument) -> None:
        """Count one document."""
        self.num_documents += 1
        self.num_targets += sum(sample.num_targets for sample in document.samples)
        self.num_truncated += document.num_cut_tokens > 0
        self.num_cut_tokens += document.num_cut_tokens
        self.longest = max(self.longest, document.num_tokens)
        self.num_without_targets += not document.samples

    def described(self, name: str, *, num_rows: int, length: int) -> str:
        """Describe a data set in a line, with more for what was left out.

        Args:
            name: Name of the data set.
            num_rows: Rows that the samples were laid into.
            length: Tokens per row.
        """
        text = (
            f"{name}: {self.num_documents} documents, {self.num_targets:,} target tokens "
            f"in {num_rows} rows of {length}{self.cut_off(name, f'data.max_seq_length ({length})')}"
        )
        if self.num_without_targets:
            text += (
                f"\n{name}: {self.num_without_targets} documents are left out, for nothing that is trained on is "
                f"within their first {length} tokens"
            )
        return text

    def cut_off(self, name: str, limit: str) -> str:
        """Describe in a further line what was cut off beyond a limit; empty if nothing was."""
        if not self.num_truncated:
            return ""
        percent = 100 * self.num_truncated / self.num_documents
        return (
            f"\n{name}: {self.num_truncated} documents ({percent:.3g} %) are longer than {limit}: "
            f"{self.num_cut_tokens:,} tokens at their ends are left out; the longest has {self.longest:,}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedDocument:
    """The samples of one document."""

    samples: list[Sample]
    """Those with anything to train on; more than one of a text that continues from row to row."""
    num_tokens: int
    num_cut_tokens: int
    """Tokens at its end that are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedData:
    """All samples of a data set, and counts of what did not fit."""

    samples: list[Sample]
    counts: Counts


def tokenize(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    max_seq_length: int,
    assistant_only: bool,
    continue_long: bool,
    name: str = "data",
) -> TokenizedData:
    """Tokenize all documents; `name` is that of the data set, for messages, and `tokenized` has the other arguments.

    Raises:
        ConfigError: the tokenizer is not a fast one or has no end token, or no document has anything to train on.
    """
    samples: list[Sample] = []
    counts = Counts()
    counting = Counting(f"tokenizing the {name} documents", total=len(documents))
    for each in tokenized(
        documents,
        tokenizer,
        max_seq_length=max_seq_length,
        assistant_only=assistant_only,
        continue_long=continue_long,
    ):
        samples += each.samples
        counts.add(each)
        counting.add(1)
    refuse_nothing_to_train(counts, name, max_seq_length)
    return TokenizedData(samples=samples, counts=counts)


def tokenized(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    max_seq_length: int,
    assistant_only: bool,
    continue_long: bool,
) -> Iterator[TokenizedDocument]:
    """Tokenize each document as a whole and mark the tokens that are trained on.

    A document that no chat template rendered ends with the tokenizer's `eos_token`, trained on if the text before it
    is. What does not fit is cut off at the right.

    Args:
        documents: The documents, of which some are held at a time.
        tokenizer: A fast transformers tokenizer: its offsets decide which tokens are trained on, because tokenizing
            the parts one by one would give other tokens.
        max_seq_length: Longest sample, in tokens.
        assistant_only: Train only on the parts marked `assistant`, and on the end token after them.
        continue_long: Cut a long document into several samples, instead of truncating it.

    Raises:
        ConfigError: the tokenizer is not a fast one or has no end token.
    """
    for whole in _tokenize_all(documents, tokenizer, assistant_only=assistant_only):
        # The last position predicts nothing, so a row fits one more token.
        pieces = islice(_pieces(whole, max_seq_length), None if continue_long else 1)
        num_cut = 0 if continue_long else max(0, len(whole) - max_seq_length - 1)
        yield TokenizedDocument(
            samples=[piece for piece in pieces if piece.num_targets],
            num_tokens=len(whole),
            num_cut_tokens=num_cut,
        )


def refuse_nothing_to_train(counts: Counts, name: str, max_seq_length: int) -> None:
    """Raise `ConfigError` if no document has anything to train on."""
    if counts.num_without_targets == counts.num_documents:
        raise ConfigError(
            f"none of the {counts.num_documents} {name} documents has a token to train on within "
            f"data.max_seq_length ({max_seq_length}); look at data.train_on and the data.",
            key="data.max_seq_length",
        )


def pad_id_of(tokenizer: Any) -> int:
    """Return the token of padding positions, which nothing attends to: 0 where the tokenizer has none."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def check_is_fast(tokenizer: Any) -> None:
    """Refuse a tokenizer that does not tell where in the text its tokens are."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} is not a fast tokenizer; the model's directory needs a "
            "tokenizer.json.",
            key="model.name_or_path",
        )


def _check_tokenizer(tokenizer: Any, documents: Iterable[Document]) -> None:
    check_is_fast(tokenizer)
    if tokenizer.eos_token_id is None and any(not document.rendered for document in documents):
        raise ConfigError(
            "the tokenizer has no eos_token, which ends each document; set it in the model's "
            "tokenizer_config.json.",
            key="model.name_or_path",
        )


def _tokenize_all(
    documents: Iterable[Document], tokenizer: Any, *, assistant_only: bool
) -> Iterator[Sample]:
    left = iter(documents)
    while some := list(islice(left, _DOCUMENTS_PER_CALL)):
        _check_tokenizer(tokenizer, some)
        for (rendered, has_tokens), group in groupby(some, key=_kind):
            alike = list(group)
            if has_tokens:
                yield from (_of_tokens(each, assistant_only=assistant_only) for each in alike)
                continue
            encoded = tokenizer(
                ["".join(part.text for part in document.parts) for document in alike],
                add_special_tokens=not rendered,
                return_offsets_mapping=assistant_only,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # its warning about the model's length; rows are cut here
            )
            for index, document in enumerate(alike):
                ids = encoded["input_ids"][index]
                offsets = encoded["offset_mapping"][index] if assistant_only else None
                yield _whole_sample(document, ids, offsets, eos=tokenizer.eos_token_id)


def _kind(document: Document) -> tuple[bool, bool]:
    return document.rendered, document.tokens is not None


def _of_tokens(document: Document, *, assistant_only: bool) -> Sample:
    tokens = np.array(document.tokens, dtype=np.int32)
    trained = np.array(document.trained) if assistant_only else np.ones(len(tokens), bool)
    return Sample(input_ids=tokens, targets=_targets(tokens, trained))


def _targets(tokens: Tokens, trained: npt.NDArray[np.bool_]) -> Tokens:
    """Return the target of each position, the token after it; the last position has none."""
    targets = np.full(len(tokens), IGNORED, dtype=np.int32)
    targets[:-1] = np.where(trained[1:], tokens[1:], IGNORED)
    return targets


def _whole_sample(
    document: Document, ids: list[int], offsets: Sequence[tuple[int, int]] | None, *, eos: int
) -> Sample:
    """Append the end token, and mark the tokens that are trained on."""
    tokens = np.array(ids, dtype=np.int32)
    trained = np.ones(len(ids), bool) if offsets is None else _trained(document, offsets)
    if not document.rendered:
        if ids[-1:] != [eos]:
            tokens, trained = np.append(tokens, np.int32(eos)), np.append(trained, False)
        # Also an end token that the tokenizer itself appended, which has no text.
        trained[-1] = offsets is None or document.parts[-1].assistant
    return Sample(input_ids=tokens, targets=_targets(tokens, trained))


def _trained(document: Document, offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Mark each token that contains a trained character; a token without text is not trained."""
    first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    trained = np.zeros(len(first), bool)
    start = 0
    for part in document.parts:
        end = start + len(part.text)
        if part.assistant:
            trained |= (first < end) & (last > start)
        start = end
    return trained


def _pieces(whole: Sample, length: int) -> Iterator[Sample]:
    """Cut into samples; each position keeps its target, also the last one of a piece."""
    if len(whole) <= length:
        yield whole
        return
    # The final token predicts nothing: it gets no piece of its own, but stays if it fits.
    for start in range(0, len(whole) - 1, length):
        end = start + length
        # Copies: a view would keep the memory of what is cut off.
        yield Sample(
            input_ids=whole.input_ids[start:end].copy(), targets=whole.targets[start:end].copy()
        )
