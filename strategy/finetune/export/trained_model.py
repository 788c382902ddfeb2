"""Opens a run's trained model without training: its run file, its base and one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from thunder_memsave.callbacks.checkpoint import is_checkpoint_name, list_checkpoints
from thunder_memsave.checkpoints.disk_errors import disk_error, told
from thunder_memsave.checkpoints.manifest import (
    DamagedCheckpointError,
    Manifest,
    UnverifiableCheckpointError,
)
from thunder_memsave.checkpoints.sources import TensorSource
from thunder_memsave.finetune.export.checkpoint_weights import (
    MODEL,
    model_in,
    verified_manifest,
)
from thunder_memsave.finetune.model.build import build_model, load_tokenizer
from thunder_memsave.finetune.model.trained_part import trained_part
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.fp8.compute.linears import is_scaling_state
from thunder_memsave.fp8.weights.loaded import weight_of_scale
from thunder_memsave.materialize.pending_weights import (
    fingerprint_of_files,
    names_in_files,
    names_of_bytes_in_files,
    reads_from_files,
)
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.stored_weights.formats import format_named
from thunder_memsave.stored_weights.in_bytes import FrozenInBytes

_MAX_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model on the meta device, and a reader of its weights."""

    checkpoint: Path
    config: RunConfig
    tokenizer: Any
    model: nn.Module
    """The model as training built it, adapter included."""
    read: Callable[[str], Tensor]
    """Returns a parameter or buffer by its name in `model`, as training had it."""
    as_trained: Callable[[str, Tensor], Tensor]
    """`(name in the model, value in the base's files) -> value` that training computed with, dequantised."""


def find_trained_model(path: Path, overrides: Sequence[str] = ()) -> TrainedModel:
    """Open the newest checkpoint of a run, or the one at `path`, and verify every file of it.

    Args:
        path: A run's directory, or one of its checkpoints.
        overrides: Overrides of keys of its run file, such as the base model's new place.

    Raises:
        ConfigError: there is none, it is damaged, or it belongs to another model than the run file or the base's files.
    """
    directory, checkpoint = _checkpoint(path)
    manifest = _manifest(checkpoint)
    config = load_run_config(directory.config, overrides)
    tokenizer = load_tokenizer(config.model)
    model = build_model(config, tokenizer)
    in_files = _checked_base(model, manifest, checkpoint, config)
    _refuse_fp8_alone(manifest, checkpoint)
    as_trained = _as_trained(config, model)
    _refuse_bytes_alone(config, model, manifest, checkpoint)
    _check_tensors(model, in_files, manifest, checkpoint)
    try:
        weights = model_in(checkpoint)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"cannot read {checkpoint}: {error}; name another checkpoint.") from error
    read = _reader(model, weights, checkpoint, config.model.name_or_path, as_trained)
    return TrainedModel(
        checkpoint=checkpoint,
        config=config,
        tokenizer=tokenizer,
        model=model,
        read=read,
        as_trained=as_trained,
    )


def _as_trained(config: RunConfig, model: nn.Module) -> Callable[[str, Tensor], Tensor]:
    """Return the function that gives a base's weight the values that training computed with."""
    if config.model.frozen_weights is None:
        return lambda name, value: value
    kept_in = format_named(config.model.frozen_weights)
    kept = FrozenInBytes(model, kept_in, data_parallel=None)
    # What files have quantised is read dequantised.
    names = frozenset(kept.names) - names_of_bytes_in_files(model)

    def as_trained(name: str, value: Tensor) -> Tensor:
        return kept.format_of(name).round_trip(value, name=name) if name in names else value

    return as_trained


def _reader(
    model: nn.Module,
    weights: TensorSource,
    checkpoint: Path,
    base: str,
    as_trained: Callable[[str, Tensor], Tensor],
) -> Callable[[str], Tensor]:
    """Return a reader of the checkpoint, and of the base model's files for frozen weights that only they hold."""
    own = model.state_dict(keep_vars=True)
    saved, files = frozenset(weights.names()), reads_from_files(model)

    def read(name: str) -> Tensor:
        with _read_from(checkpoint if name in saved else base, name):
            if name in saved:
                return weights.read(name)
            return as_trained(name, files[name]().to(own[name].dtype))

    return read


@contextmanager
def _read_from(source: Path | str, name: str) -> Iterator[None]:
    """Name the unreadable file in an error: it is not in the directory that the export writes."""
    try:
        yield
    except Exception as error:  # by type, safetensors' own is not a disk error
        found = disk_error(error)
        if found is None:
            raise
        raise ConfigError(
            f"cannot read {name!r} of {source}: {told(found)}; nothing was exported. See that its files are there and "
            "can be read, and export again."
        ) from error


def _checkpoint(path: Path) -> tuple[RunDirectory, Path]:
    if not path.is_dir():
        raise ConfigError(
            f"there is no run {path}; name an output_dir, or a checkpoint in it, such as "
            "runs/first/checkpoints/step-00000100."
        )
    if is_checkpoint_name(path.resolve().name):
        directory, checkpoint = RunDirectory(root=path.resolve().parents[1]), path
    else:
        directory = RunDirectory(root=path)
        found = list_checkpoints(directory.checkpoints)
        if not found:
            raise ConfigError(
                f"{path} has no checkpoint in {directory.checkpoints.name}/; name the output_dir of a run that saved."
            )
        checkpoint = found[-1]
    if not directory.config.is_file():
        raise ConfigError(
            f"{checkpoint} has no run file {directory.config}, which says what was trained; copy the whole output_dir."
        )
    return directory, checkpoint


def _manifest(checkpoint: Path) -> Manifest:
    try:
        return verified_manifest(checkpoint)
    except UnverifiableCheckpointError as error:
        raise ConfigError(str(error)) from error
    except (DamagedCheckpointError, OSError) as error:
        others = [path for path in list_checkpoints(checkpoint.parent) if path != checkpoint]
        named = f"such as {others[-1]}" if others else "if there is a copy"
        raise ConfigError(
            f"{checkpoint} is damaged: {error}. Name another checkpoint, {named}."
        ) from error


def _checked_base(
    model: nn.Module, manifest: Manifest, checkpoint: Path, config: RunConfig
) -> frozenset[str]:
    """Return the names that are in the base model's files, and check that these are the run's."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return frozenset()
    names = names_in_files(model)
    now = fingerprint_of_files(model) if names else None
    if now != manifest.values.get("base_model"):
        raise ConfigError(
            f"{checkpoint} was trained on other frozen weights than those of model.name_or_path "
            f"{config.model.name_or_path}, and does not hold them; restore the model, or say where it is by "
            "--model.name_or_path.",
            key="model.name_or_path",
        )
    return names


def _refuse_fp8_alone(manifest: Manifest, checkpoint: Path) -> None:
    """Refuse a run that made its base itself (`model.config`): no file has those weights."""
    weights = [weight_of_scale(name) for name in manifest.tensors.get(MODEL, {})]
    kept = [name for name in weights if name is not None]
    if kept:
        raise ConfigError(
            f"{checkpoint} holds {len(kept)} frozen weights in fp8 alone (fp8.frozen_weights: fp8), such as {kept[0]}, "
            "which export does not read and no base model's files have; train with fp8.frozen_weights: compute, or on "
            "a model.name_or_path that has weights.",
            key="fp8.frozen_weights",
        )


def _refuse_bytes_alone(
    config: RunConfig, model: nn.Module, manifest: Manifest, checkpoint: Path
) -> None:
    """Refuse the same for weights that are bytes of a format."""
    if config.model.frozen_weights is None:
        return
    kept_in = format_named(config.model.frozen_weights)
    names = FrozenInBytes(model, kept_in, data_parallel=None).names
    kept = [name for name in names if name in manifest.tensors.get(MODEL, {})]
    if kept:
        raise ConfigError(
            f"{checkpoint} holds {len(kept)} frozen weights in {kept_in.title} alone (model.frozen_weights: "
            f"{kept_in.setting}), such as {kept[0]}, which export does not read and no base model's files have; leave "
            "model.frozen_weights out, or train on a model.name_or_path that has weights.",
            key="model.frozen_weights",
        )


def _check_tensors(
    model: nn.Module, in_files: frozenset[str], manifest: Manifest, checkpoint: Path
) -> None:
    wanted = _described(trained_part(model, in_files=in_files))
    found = {
        name: dict(entry)
        for name, entry in manifest.tensors.get(MODEL, {}).items()
        if not is_scaling_state(name)
    }
    if wanted == found:
        return
    names = [n for n in sorted(wanted.keys() | found.keys()) if wanted.get(n) != found.get(n)]
    lines = [f"\n  {n}: {_shown(found.get(n))} -> {_shown(wanted.get(n))}" for n in names]
    more = f"\n  and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
    raise ConfigError(
        f"{checkpoint} holds another model than the run file beside it and its base describe, in {len(names)} "
        f"places (checkpoint -> run file):{''.join(lines[:_MAX_SHOWN])}{more}\nRestore config.yaml and the base model."
    )


def _described(part: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "is_trained": tensor.requires_grad,
        }
        for name, tensor in part.state_dict(keep_vars=True).items()
    }


def _shown(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "not there"
    trained = "trained" if entry.get("is_trained") else "frozen"
    return f"{entry.get('dtype')} {entry.get('shape')}, {trained}"
