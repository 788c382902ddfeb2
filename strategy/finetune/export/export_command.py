"""The command `thunder-memsave export`: a run in, an adapter or a whole model out, renamed once verified."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from thunder_memsave.finetune.export.export_directory import check_out, directory_for
from thunder_memsave.finetune.run_file.reading.arguments import take_options
from thunder_memsave.settings.problems import ConfigError, suggestion
from thunder_memsave.settings.schema import Reader
from thunder_memsave.settings.value_kinds import Bytes

if TYPE_CHECKING:
    from thunder_memsave.finetune.export.trained_model import TrainedModel
    from thunder_memsave.finetune.export.verified_export import Verified

_OPTIONS = {"--out": "exported", "--dtype": "bfloat16", "--max-file-size": "5GB"}
_FLAGS = ("--merge",)
_DTYPES = ("float32", "bfloat16")
_OVERRIDES = ("--model.name_or_path", "--model.revision")
_USAGE = "thunder-memsave export RUN --out DIR [--merge]"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Arguments of the command line."""

    run: Path
    """An output_dir, or one of its checkpoints."""
    out: Path
    merge: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of a whole model's weights; None means the run file's."""
    max_file_bytes: int = 5 * 10**9
    overrides: tuple[str, ...] = ()


def parse_export_options(arguments: Sequence[str]) -> ExportOptions:
    """Read the command's arguments.

    Raises:
        ConfigError: one is missing, unknown or has an invalid value.
    """
    given, rest = take_options(arguments, _OPTIONS, flags=_FLAGS)
    overrides = [each for each in rest if each.name in _OVERRIDES and each.value is not None]
    runs = [each.shown for each in rest if not each.name.startswith("--")]
    for each in rest:
        if each.name.startswith("--") and each not in overrides:
            nearest = suggestion(each.name, (*_OPTIONS, *_FLAGS))
            raise ConfigError(f"export has no option {each.name!r}{nearest} Write {_USAGE}.")
    if len(runs) != 1 or "--out" not in given:
        raise ConfigError(f"export needs one run and where to write: {_USAGE}.")
    return ExportOptions(
        run=Path(runs[0]),
        out=Path(given["--out"]),
        merge="--merge" in given,
        dtype=_dtype(given.get("--dtype")),
        max_file_bytes=Reader().value(
            Bytes, given.get("--max-file-size", "5GB"), where="--max-file-size"
        ),
        overrides=tuple(word for each in overrides for word in each.typed),
    )


def run_export(options: ExportOptions) -> int:
    """Export; the directory gets its name only after it was verified against the trained weights.

    Raises:
        ConfigError: the run, its base, or the output directory cannot be used.
        ExportError: the files differ from the trained weights; nothing is left of them.
    """
    check_out(options.out)
    # These imports take seconds; mistakes in the arguments are found first.
    from transformers.utils import logging

    from thunder_memsave.finetune.export.export import is_adapted
    from thunder_memsave.finetune.export.trained_model import find_trained_model

    logging.disable_progress_bar()
    trained = find_trained_model(options.run, options.overrides)
    print(f"exporting {trained.checkpoint}, whose files are as they were written", flush=True)
    has_adapter = is_adapted(trained.model)
    if options.merge and not has_adapter:
        raise ConfigError(
            f"--merge is given, but {options.run} trained no adapter; leave it out, the whole model is exported."
        )
    whole = options.merge or not has_adapter
    with directory_for(options.out) as temporary, _refused(trained.checkpoint):
        verified = (
            _whole(trained, options, temporary) if whole else _adapter(trained, options, temporary)
        )
    print(_told(verified, what="model" if whole else "adapter", options=options), flush=True)
    return 0


def _adapter(trained: TrainedModel, options: ExportOptions, directory: Path) -> Verified:
    from thunder_memsave.finetune.export.exported_files import write_adapter
    from thunder_memsave.finetune.export.verified_export import verify_adapter

    if options.dtype is not None:
        raise ConfigError("--dtype is of whole models; leave it out, or add --merge.")
    if trained.config.model.config is not None:
        raise ConfigError(
            f"{options.run} trained an adapter of weights that it made itself (model.config), and no file has those; "
            "add --merge, which exports the whole model."
        )
    write_adapter(trained, directory)
    return verify_adapter(trained, directory)


def _whole(trained: TrainedModel, options: ExportOptions, directory: Path) -> Verified:
    import torch

    from thunder_memsave.finetune.export.exported_files import whole_model, write_whole_model
    from thunder_memsave.finetune.export.verified_export import verify_whole_model

    settings = trained.config.model
    name = options.dtype or (settings.dtype if options.merge else settings.trainable_dtype)
    dtype: torch.dtype = getattr(torch, name)
    plain = whole_model(trained, dtype=dtype)
    _check_space(options.out, sum(weight.num_bytes for weight in plain.weights))
    write_whole_model(
        plain, trained.tokenizer, directory, dtype=dtype, max_file_bytes=options.max_file_bytes
    )
    print("verifying", flush=True)  # minutes for a large one
    return verify_whole_model(trained, plain, directory)


def _told(verified: Verified, *, what: str, options: ExportOptions) -> str:
    same = (
        f"verified: on 16 tokens its logits, computed in float64, differ from those of the run's own model by "
        f"{verified.difference:.1e} of their norm"
    )
    if verified.from_rounding:
        same += f"; rounding its weights to their format changes them by {verified.from_rounding:.1e} more"
    return f"{same}\n{what}: {options.out}"


def _dtype(text: str | None) -> Literal["float32", "bfloat16"] | None:
    if text is not None and text not in _DTYPES:
        raise ConfigError(f"--dtype is {text!r}, but must be {' or '.join(_DTYPES)}.")
    return text  # type: ignore[return-value]


def _check_space(out: Path, num_bytes: int) -> None:
    """Refuse a full disk before writing, which takes minutes."""
    free = shutil.disk_usage(out.absolute().parent).free
    if free < num_bytes:
        raise ConfigError(
            f"the weights take {num_bytes:,} bytes, and the disk of {out} has {free:,} left; free some space, or name "
            "a directory elsewhere by --out."
        )


@contextmanager
def _refused(checkpoint: Path) -> Iterator[None]:
    """Turn damage that the manifest does not show into an error for the user."""
    from thunder_memsave.checkpoints.manifest import DamagedCheckpointError

    try:
        yield
    except DamagedCheckpointError as error:
        raise ConfigError(f"{checkpoint} is damaged: {error}; name another checkpoint.") from error
