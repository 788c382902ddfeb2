"""Reads what `path` of `DataFiles` may name: paths and data sets of the hub, with weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from thunder_memsave.finetune.data.files.hub_data import HubData
from thunder_memsave.finetune.data.files.read_rows import files_of
from thunder_memsave.settings.problems import ConfigError

Named: TypeAlias = str | HubData

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w-]*")
_HUB_KEYS = ("hub", "subset", "split", "revision")
_FORMS = "write a path, {path: a.jsonl, weight: 0.5}, or {hub: owner/name, split: train}"


def weights_of(path: Any, *, key: str) -> dict[Named, float]:
    """Return the weight of each entry, in the order given.

    Args:
        path: A path, a mapping, or a list of these.
        key: The argument's dotted name, for messages.

    Raises:
        ConfigError: an entry has other keys, a weight is not above 0, or something is named twice.
    """
    entries = [path] if isinstance(path, str | Mapping) else list(path)
    if not entries:
        raise ConfigError(f"{key} is an empty list; name a file.", key=key)
    weights: dict[Named, float] = {}
    for entry in entries:
        each = {"path": entry} if isinstance(entry, str) else entry
        named = named_by(each, key=key)
        weight = each.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e6:
            raise ConfigError(
                f"{key}: the weight of {named} is {weight!r}, but must be above 0.", key=key
            )
        if named in weights:
            raise ConfigError(f"{key} names {named} twice; give it a weight instead.", key=key)
        weights[named] = float(weight)
    return weights


def named_by(entry: Any, *, key: str) -> Named:
    """Return what an entry names: a path, or a data set of the hub.

    Raises:
        ConfigError: it is none of the known forms.
    """
    if isinstance(entry, str):
        return entry
    keys = entry.keys() if isinstance(entry, Mapping) else set()
    values = {name: entry[name] for name in keys if name != "weight"}
    is_text = all(isinstance(value, str) and value for value in values.values())
    if is_text and values.keys() == {"path"}:
        return str(values["path"])
    if is_text and "hub" in values and not values.keys() - {*_HUB_KEYS}:
        values["name"] = values.pop("hub")
        return HubData(**values)
    raise ConfigError(f"{key} has {entry!r}; {_FORMS}.", key=key)


def files_named(named: Named) -> Sequence[Path]:
    """Return the files of an entry; those of the hub are fetched.

    Raises:
        ConfigError: there are none, or they cannot be fetched.
    """
    if isinstance(named, HubData):
        return named.files()
    if _HUB_NAME.fullmatch(named) and not Path(named).exists():
        raise ConfigError(
            f"cannot read the data file {named}: there is none here. A data set of the hub is {{hub: {named}}}."
        )
    return files_of(Path(named))
