"""Checks that a run matches the one whose checkpoint it resumes from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peft import LoraConfig

from thunder_memsave.callbacks.checkpoint import CheckpointInfo
from thunder_memsave.config import Fp8Config
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.settings.schema import parse_section

_DATA = (
    "The rows follow from the data files, the tokenizer with its chat template (some write today's date), "
    "data.max_seq_length, data.packing and the dataset's streaming."
)
# Keys to check if the differing value does not name one.
_CAUSES = {
    "num_rows": _DATA,
    "fingerprint_of_rows": _DATA,
    "global_batch_size": "Leave one of train.micro_batch_size and train.gradient_accumulation_steps out, for the "
    "number of processes is the third.",
}
# Values of a checkpoint that have another name in the run file, or none.
_KEYS = {
    "seed": "train.seed",
    "global_batch_size": "train.global_batch_size",
    "optimizer_class": "optimizer.class_path",
    "num_rows": "number of rows",
    "fingerprint_of_rows": "contents of the rows",
}
_MOST_SHOWN = 60
_MOST_LISTED = 20


def check_same_run(
    info: CheckpointInfo, values: Mapping[str, int | str], config: RunConfig
) -> None:
    """Check that a step of the checkpoint, and its optimizer's state, mean the same in this run.

    Args:
        info: The checkpoint.
        values: Values that give a step its meaning and are not a single key of the run file.
        config: This run. Only keys that change what the model computes are compared.

    Raises:
        ConfigError: something differs; the message lists all differences.
    """
    found = [*_differing(info.values, values)]
    if info.config is not None:
        before, now = _meaning(info.config), _meaning(dataclasses.asdict(config))
        # Keys of a removed section are None now.
        found += _differing(before, dict.fromkeys(before) | now)
    if not found:
        return
    causes = dict.fromkeys(_CAUSES[name] for name, _, _ in found if name in _CAUSES)
    hints = "".join(f" {cause}" for cause in causes)
    raise ConfigError(
        f"{info.path} was written with other settings than this run has, so it cannot resume from there:\n\n"
        f"{_table(found)}\n\n"
        f"Restore the old values, or start a new run in another output_dir.{hints}",
        key="resume",
    )


def _table(found: Sequence[_Difference]) -> str:
    """Lay out key, old and new value; the keys are the run file's own."""
    rows = [("key", "checkpoint", "this run")]
    rows += [(_KEYS.get(name, name), _shown(old), _shown(new)) for name, old, new in found]
    widths = [max(len(row[i]) for row in rows[: _MOST_LISTED + 1]) for i in range(2)]
    lines = [f"    {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    shown = lines[: _MOST_LISTED + 1]
    if len(lines) > len(shown):
        shown.append(f"    ... and {len(lines) - len(shown)} more")
    return "\n".join(shown)


_Difference = tuple[str, object, object]


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[_Difference]:
    """Yield name, old and new value where the two differ; a value that only one has is None in the other."""
    for name in new:
        if old.get(name) != new[name]:
            yield name, old.get(name), new[name]


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that change what the model computes, with their defaults, as plain values."""
    model = config.get("model") or {}
    fp8 = config.get("fp8")
    sections = {
        "model.config": model.get("config"),
        "model.dtype": model.get("dtype"),
        "model.trainable_dtype": model.get("trainable_dtype"),
        "model.frozen_weights": model.get("frozen_weights"),
        "optimizer.states": _states(config),
        "lora": _with_defaults(config.get("lora")),
        "adapter": config.get("adapter"),
        "preference": config.get("preference"),
        "fp8": None if fp8 is None else parse_section(Fp8Config, fp8, where="fp8"),
    }
    plain = json.loads(json.dumps(sections, default=_plain))
    return {key: value for name, part in plain.items() for key, value in _flat(name, part)}


def _states(config: Mapping[str, Any]) -> str:
    """Return the format of the optimizer's states; that of trained weights is the default."""
    trainable_dtype = (config.get("model") or {}).get("trainable_dtype", "float32")
    return str((config.get("optimizer") or {}).get("states", trainable_dtype))


def _with_defaults(lora: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Fill in peft's defaults: leaving out a key means the same as giving its default."""
    if lora is None:
        return None
    made = [field for field in dataclasses.fields(LoraConfig) if field.init]
    defaults = {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in made
    }
    return {**defaults, **lora}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    elif isinstance(value, list) and all(isinstance(part, str) for part in value):
        yield name, sorted(value)
    else:
        yield name, value


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _shown(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
