"""The options of `plan --search`: which axes, which ranks and devices, and what an hour of a GPU costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thunder_memsave.finetune.plan import device_options
from thunder_memsave.planner.graph import Device
from thunder_memsave.settings.problems import ConfigError, suggestion

SEARCH, PRICE, WRITE = "--search", "--price", "--write"
EXAMPLES: Mapping[str, str] = {
    SEARCH: "micro_batch_size,sharding",
    PRICE: "2.5",
    WRITE: "best.yaml",
}
"""Options with examples of their values; `--search` may have none."""

AXES: Mapping[str, str] = {
    "micro_batch_size": "train.micro_batch_size; the global batch stays",
    "sharding": "strategy.sharding: none, zero2, zero3",
    "frozen_weights": "formats of frozen weights; of trained ones if none are frozen",
    "states": "formats of the optimizer's states",
    "offload": "memory.offload",
    "max_seq_length": "data.max_seq_length: half and twice",
    "fp8": "linear layers in fp8, where the device computes in it",
}
"""What can be searched."""
_BY_NAME = ("max_seq_length", "fp8")
"""Axes that change what is computed, which are searched where they are named."""
_ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """What to search."""

    axes: tuple[str, ...] = ()
    num_ranks: tuple[int, ...] = ()
    """Numbers of ranks; empty: the run's."""
    devices: tuple[Device, ...]
    price: float | None = None
    """Of one device for an hour, in any currency; None: costs are not shown."""
    write: Path | None = None
    """Where the best becomes a run file."""


def with_value(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a value for `--search` where it has none: the next word may be an override."""
    found = list(arguments)
    if SEARCH in found:
        at = found.index(SEARCH)
        following = found[at + 1] if at + 1 < len(found) else "-"
        if following.startswith("-") or "=" in following:
            found[at] = f"{SEARCH}={_ALL}"
    return found


def search_options(given: Mapping[str, str]) -> SearchOptions | None:
    """Return what to search; None: nothing.

    Args:
        given: Options of the command line with their values.

    Raises:
        ConfigError: an option cannot be read, or needs `--search`.
    """
    if SEARCH not in given:
        for option in (PRICE, WRITE):
            if option in given:
                raise ConfigError(
                    f"{option} is of a search, and has no effect without {SEARCH}; add {SEARCH}."
                )
        return None
    return SearchOptions(
        axes=_axes(given[SEARCH]),
        num_ranks=_ranks(given.get("--world-size")),
        devices=_devices(given),
        price=_price(given.get(PRICE)),
        write=_new_file(given.get(WRITE)),
    )


def _axes(text: str) -> tuple[str, ...]:
    if text == _ALL:
        return tuple(name for name in AXES if name not in _BY_NAME)
    names = _words(SEARCH, text)
    for name in names:
        if name not in AXES:
            raise ConfigError(
                f"{SEARCH} has {name!r}, which is no axis{suggestion(name, AXES)} The axes are {', '.join(AXES)}; "
                f"{SEARCH} alone searches all but {' and '.join(_BY_NAME)}."
            )
    return tuple(dict.fromkeys(names))


def _ranks(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    names = _words("--world-size", text)
    for name in names:
        if not name.isdecimal() or int(name) < 1:
            raise ConfigError(
                f"--world-size is {text!r}, but must be whole numbers of at least 1, such as 1,8."
            )
    return tuple(dict.fromkeys(map(int, names)))


def _devices(given: Mapping[str, str]) -> tuple[Device, ...]:
    text = given.get(device_options.DEVICE)
    if text is None:
        return (device_options.chosen_device(given),)
    names = _words(device_options.DEVICE, text)
    return tuple(
        device_options.chosen_device({**given, device_options.DEVICE: name})
        for name in dict.fromkeys(names)
    )


def _price(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{PRICE} is {text!r}; write what one device costs for an hour, such as {EXAMPLES[PRICE]}."
        )
    return value


def _new_file(text: str | None) -> Path | None:
    """Refuse what cannot be written before the search, which takes minutes."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{WRITE} is {path}, but a run file is YAML; name it {path.with_suffix('.yaml')}."
        )
    if path.exists():
        raise ConfigError(f"{WRITE} is {path}, which exists and stays as it is; name a new file.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{WRITE} is {path}, but there is no directory {path.parent}; make it, or name a file elsewhere."
        )
    return path


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(f"{option} is {text!r}, in which a name is empty; write such as a,b.")
    return words
