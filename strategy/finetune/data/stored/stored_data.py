"""Makes the rows of `DataFiles` that streams: each file is read once, and its tokens are kept in the cache."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.data.counting import Counting
from thunder_memsave.finetune.data.data_files import DataFiles, Source
from thunder_memsave.finetune.data.files.read_rows import count_rows
from thunder_memsave.finetune.data.formats import num_held_out
from thunder_memsave.finetune.data.packing import Rows
from thunder_memsave.finetune.data.stored.identity import check_unchanged, identity_of, key_of
from thunder_memsave.finetune.data.stored.places import StoredPlaces, write_places
from thunder_memsave.finetune.data.stored.samples import SampleWriter, StoredSamples
from thunder_memsave.finetune.data.stored.shares import Shares
from thunder_memsave.finetune.data.tokenize import (
    Counts,
    TokenizedDocument,
    check_is_fast,
    pad_id_of,
    refuse_nothing_to_train,
    tokenized,
)
from thunder_memsave.finetune.disk_cache import cached
from thunder_memsave.finetune.run_file.config import DataConfig
from thunder_memsave.measure.disk_table import cache_directory
from thunder_memsave.settings.problems import ConfigError

_CONTENTS = "data.json"
_CHUNK = 1000
"""Documents that are assigned to their sets together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredData:
    """The rows of both sets, read from the cache."""

    train: Rows
    validation: Rows | None
    summary: str
    """What was read and what was cut, in lines for the user."""


def stored_data(dataset: DataFiles, config: DataConfig, tokenizer: Any) -> StoredData:
    """Return the rows of the files, which are read and tokenized unless the cache has them.

    Raises:
        ConfigError: files or rows cannot be used, or the cache cannot be written.
    """
    check_is_fast(tokenizer)
    dataset.check_tokenizer(tokenizer)
    work = _Work(dataset=dataset, config=config, tokenizer=tokenizer)
    identity = identity_of(dataset, config, tokenizer)

    def make(directory: Path) -> None:
        work.write(directory)
        check_unchanged(identity, dataset, config, tokenizer)

    root = cache_directory() / "data"
    try:
        entry = cached(
            root,
            key_of(identity),
            make,
            is_whole=_is_whole,
            waits_for="another process, which tokenizes the data",
        )
    except OSError as error:
        raise ConfigError(
            f"the tokens of the data cannot be written to {root}: {error.strerror or error}. Free some space there, or "
            "name a directory of another disk in the environment variable THUNDER_MEMSAVE_CACHE.",
            key="data.dataset.init_args.streaming",
        ) from error
    contents = json.loads((entry / _CONTENTS).read_text(encoding="utf-8"))
    pad_id = pad_id_of(tokenizer)
    # One shape of batch for both.
    num_documents = max(each["num_documents"] for each in contents["sets"].values())
    rows = {
        name: Rows(
            samples=StoredSamples(entry / name),
            places=StoredPlaces(entry / name),
            length=config.max_seq_length,
            num_documents=num_documents,
            pad_id=pad_id,
            known_fingerprint=each["fingerprint"],
        )
        for name, each in contents["sets"].items()
    }
    summary = f"{contents['summary']}\ntokens are in {entry}"
    return StoredData(train=rows["train"], validation=rows.get("validation"), summary=summary)


def _is_whole(entry: Path) -> bool:
    """Tell whether all files are there with their sizes."""
    try:
        sizes = json.loads((entry / _CONTENTS).read_text(encoding="utf-8"))["sizes"]
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(kw_only=True, slots=True)
class _Set:
    """The files of one set while they are written."""

    name: str
    directory: Path
    writer: SampleWriter
    counts: Counts = field(default_factory=Counts)

    def add(self, document: TokenizedDocument, *, times: int) -> None:
        for _ in range(times):
            self.counts.add(document)
        if times:
            for sample in document.samples:
                self.writer.append(sample, times=times)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What the rows are made of."""

    dataset: DataFiles
    config: DataConfig
    tokenizer: Any

    def write(self, directory: Path) -> None:
        """Write an entry of the cache."""
        lines, made = [], {}
        has_validation = bool(self.dataset.val_fraction or self.dataset.val_path)
        with ExitStack() as stack:
            sets = [
                _new_set(directory, name, stack)
                for name in ("train", *(["validation"] if has_validation else []))
            ]
            counting = Counting("tokenizing rows", total=None)
            for source in self.dataset.sources:
                num_rows = self._split(source, sets, counting)
                lines.append(source.described(num_rows, self.tokenizer))
            for source in self.dataset.validation_sources:
                for document in self._tokenized(source):
                    counting.add(1)
                    sets[-1].add(document, times=1)
            digests = [each.writer.finish() for each in sets]
        for each, digest in zip(sets, digests, strict=True):
            made[each.name] = self._laid_out(each, digest)
            lines.append(made[each.name].pop("summary"))
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
        contents = {"sets": made, "summary": "\n".join(lines), "sizes": sizes}
        (directory / _CONTENTS).write_text(json.dumps(contents, indent=1), encoding="utf-8")

    def _split(self, source: Source, sets: list[_Set], counting: Counting) -> int:
        """Tokenize a file's rows into both sets, and return their number."""
        fraction = self.dataset.val_fraction
        is_counted = bool(fraction or source.weight % 1)
        num_rows = count_rows(source.path, source.kind) if is_counted else 0
        held_out = num_held_out(num_rows, fraction, path=source.path) if fraction else 0
        shares = Shares(num_rows=num_rows, num_held_out=held_out, weight=source.weight)
        documents = self._tokenized(source)
        while chunk := list(islice(documents, _CHUNK)):
            are_held_out, times = shares.next_rows(len(chunk))
            for document, is_held_out, count in zip(chunk, are_held_out, times, strict=True):
                if is_held_out:
                    sets[-1].add(document, times=1)
                else:
                    sets[0].add(document, times=int(count))
            counting.add(len(chunk))
        return shares.num_seen

    def _tokenized(self, source: Source) -> Iterator[TokenizedDocument]:
        has_assistant_part = self.dataset.has_assistant_part
        return tokenized(
            self.dataset.documents(source, self.tokenizer),
            self.tokenizer,
            max_seq_length=self.config.max_seq_length,
            assistant_only=has_assistant_part and self.config.train_on != "all",
            continue_long=self.dataset.continues_in_next_row,
        )

    def _laid_out(self, each: _Set, digest: str) -> dict[str, Any]:
        """Lay the samples of a set into rows, and describe it."""
        length = self.config.max_seq_length
        refuse_nothing_to_train(each.counts, each.name, length)
        most = self.config.max_documents_per_row if self.config.packing else 1
        places = write_places(
            each.directory,
            StoredSamples(each.directory),
            length=length,
            packing=self.config.packing,
            max_documents=most,
        )
        num_rows = len(StoredPlaces(each.directory))
        return {
            "num_documents": most or places.num_documents,
            "fingerprint": f"streamed-{key_of([length, digest, places.digest])[:16]}",
            "counts": dataclasses.asdict(each.counts),
            "summary": each.counts.described(each.name, num_rows=num_rows, length=length),
        }


def _new_set(directory: Path, name: str, stack: ExitStack) -> _Set:
    files = directory / name
    files.mkdir()
    return _Set(name=name, directory=files, writer=stack.enter_context(SampleWriter(files)))
