"""The sections of a run file that the strategy parses: a mapping here, a dataclass there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thunder_memsave.config import Fp8Config, MemoryConfig, parse_fp8, parse_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSection:
    """A section that the strategy parses."""

    config: type[Any]
    """The dataclass with its keys."""

    parse: Callable[[object], object]
    """Makes the dataclass from a mapping, or raises ConfigError."""


OWN_SECTIONS: Mapping[str, OwnSection] = {
    "memory": OwnSection(config=MemoryConfig, parse=parse_memory),
    "fp8": OwnSection(config=Fp8Config, parse=parse_fp8),
}
