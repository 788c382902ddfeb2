"""Lays examples of preferences into rows of one length, and makes batches of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thunder_memsave.finetune.data.packing import Batch, Rows, best_fits
from thunder_memsave.finetune.data.preferences.examples import Example, ExampleKind
from thunder_memsave.finetune.data.tokenize import IGNORED, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceBatch:
    """Some rows of examples. A row has room for a number of examples; what is of examples has one entry per room."""

    texts: Batch
    """All samples; a pair's rejected sample follows the chosen one."""

    is_example: Tensor
    """1 for an example, 0 for room without one: float32 of (examples,)."""

    is_desirable: Tensor
    """1 or 0, float32 of (examples,); 1 for a pair."""

    reference: Tensor
    """Log-probabilities of the reference model, summed over the completion of each sample, a mismatched one last:
    float32 of (examples, samples); 0 if there is none."""

    is_completion: Tensor | None = None
    """Whether a target is of a completion, bool of (rows, length), where prompts are targets too."""

    mismatched: Batch | None = None
    """The prompts of single samples with other completions."""

    shared: Tensor
    """What the objective knows of all batches of a step: a float32 scalar."""

    def to(self, device: torch.device) -> PreferenceBatch:
        """Copy the batch to a device; to a GPU from pinned memory without waiting for the copy."""
        ahead = device.type == "cuda"
        return self._each(
            lambda tensor: tensor.to(device, non_blocking=ahead), lambda batch: batch.to(device)
        )

    def pin_memory(self) -> PreferenceBatch:
        """Copy the batch into memory that a GPU can read by itself."""
        return self._each(Tensor.pin_memory, Batch.pin_memory)

    def _each(
        self, tensors: Callable[[Tensor], Tensor], batches: Callable[[Batch], Batch]
    ) -> PreferenceBatch:
        changed: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None:
                changed[name] = batches(value) if isinstance(value, Batch) else tensors(value)
        return PreferenceBatch(**changed)


@dataclass(frozen=True, kw_only=True)
class PreferenceRows:
    """All rows of a data set, as lists of examples."""

    examples: Sequence[Example]
    places: Sequence[Sequence[int]]
    """Example numbers of each row, in order."""

    length: int
    """Tokens per row."""

    kind: ExampleKind

    examples_per_row: int
    """Examples for which each row has room."""

    is_packed: bool
    """Whether a row's samples share one row of tokens; else each has a row of tokens of its own."""

    pad_id: int
    """Token of padding positions."""

    reference: Tensor | None = None
    """Log-probabilities of the reference model, float32 of (examples, samples), see `PreferenceBatch`."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def num_documents(self) -> int:
        """Samples for which each row of tokens has room."""
        return self.examples_per_row * self.kind.num_samples if self.is_packed else 1

    @property
    def samples(self) -> list[Sample]:
        """All samples but the mismatched ones."""
        return [sample for example in self.examples for sample in example.samples]

    @property
    def num_scores(self) -> int:
        """Log-probabilities that the reference model gives each example."""
        return self.kind.num_samples + self.kind.has_mismatched

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every token, target, label and place: equal for equal training data."""
        content = hashlib.sha256(
            f"{self.length} {self.is_packed} {self.kind.trains_prompts} {self.places}".encode()
        )
        for example in self.examples:
            content.update(b"1" if example.is_desirable else b"0")
            for sample in example.samples:
                content.update(sample.input_ids.tobytes())
                content.update(sample.targets.tobytes())
        return content.hexdigest()[:16]

    def with_reference(self, reference: Tensor) -> PreferenceRows:
        """Return the rows with the reference model's log-probabilities."""
        return replace(self, reference=reference)

    def numbers_of(self, chosen: Sequence[int | None]) -> list[int | None]:
        """Return the number of the example in each room of some rows; None: there is none."""
        found: list[int | None] = []
        for row in chosen:
            places = [] if row is None else list(self.places[row])
            found += [*places, *[None] * (self.examples_per_row - len(places))]
        return found

    def lay_out(self, chosen: Sequence[int | None]) -> PreferenceBatch:
        """Make the tensors of some rows; None gives a row without examples."""
        numbers = self.numbers_of(chosen)
        examples = [None if number is None else self.examples[number] for number in numbers]
        texts = self._texts([self._samples_of(example) for example in examples])
        batch = PreferenceBatch(
            texts=texts,
            is_example=_numbers(example is not None for example in examples),
            is_desirable=_numbers(e is not None and e.is_desirable for e in examples),
            reference=self._reference_of(numbers),
            shared=torch.zeros(()),
        )
        if self.kind.trains_prompts:
            batch = replace(
                batch,
                is_completion=texts.targets != IGNORED,
                texts=self._texts([_with_prompt(self._samples_of(e)) for e in examples]),
            )
        if self.kind.has_mismatched:
            others = [[] if e is None or e.mismatched is None else [e.mismatched] for e in examples]
            batch = replace(batch, mismatched=self._texts(others))
        return batch

    def _samples_of(self, example: Example | None) -> list[Sample]:
        return [] if example is None else list(example.samples)

    def _texts(self, of_examples: Sequence[list[Sample]]) -> Batch:
        """Lay out the samples of the examples of some rows."""
        if self.is_packed:
            size = self.examples_per_row
            per_row = [of_examples[i : i + size] for i in range(0, len(of_examples), size)]
            rows = [[sample for samples in row for sample in samples] for row in per_row]
        else:
            rows = [each[i : i + 1] for each in of_examples for i in range(self.kind.num_samples)]
        samples = [sample for row in rows for sample in row]
        numbers = iter(range(len(samples)))
        laid_out = Rows(
            samples=samples,
            places=[[next(numbers) for _ in row] for row in rows],
            length=self.length,
            num_documents=self.num_documents,
            pad_id=self.pad_id,
        )
        return laid_out.lay_out(list(range(len(rows))))

    def _reference_of(self, numbers: Sequence[int | None]) -> Tensor:
        found = torch.zeros(len(numbers), self.num_scores)
        if self.reference is not None:
            for place, number in enumerate(numbers):
                if number is not None:
                    found[place] = self.reference[number]
        return found


def laid_into_rows(
    examples: Sequence[Example],
    *,
    length: int,
    kind: ExampleKind,
    pad_id: int,
    packing: bool,
    max_examples: int | None,
    seed: int,
) -> PreferenceRows:
    """Lay examples into rows: as many as fit if they are packed, else one into each.

    Args:
        examples: The examples.
        length: Tokens of each row of tokens.
        kind: What each example consists of.
        pad_id: Token of padding positions.
        packing: Whether to pack.
        max_examples: Examples per packed row; None: as many as there is room for.
        seed: Of the order of packed rows.
    """
    places: list[list[int]] = [[index] for index in range(len(examples))]
    if packing:
        places = best_fits([example.length for example in examples], length, max_examples)
        random.Random(seed).shuffle(places)
    return PreferenceRows(
        examples=examples,
        places=places,
        length=length,
        kind=kind,
        examples_per_row=max_examples or max(map(len, places), default=1),
        is_packed=packing,
        pad_id=pad_id,
    )


def _with_prompt(samples: list[Sample]) -> list[Sample]:
    """Let the first sample's prompt be trained on too."""
    if not samples:
        return []
    chosen, *others = samples
    targets = np.append(chosen.input_ids[1:], chosen.targets[-1:])
    return [Sample(input_ids=chosen.input_ids, targets=targets), *others]


def _numbers(flags: Iterable[bool]) -> Tensor:
    return torch.tensor([float(flag) for flag in flags])
