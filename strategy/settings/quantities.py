"""Reads amounts with a unit, as users write them: durations, bytes and parts of a device's memory."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

from thunder_memsave.settings.problems import ConfigError

_UNITS = {
    "s": timedelta(seconds=1),
    "min": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)")

# A letter alone means 1024 of the next smaller unit, as for `docker run --memory` and Slurm's `--mem`.
_BYTES_PER_UNIT = {
    **dict.fromkeys(("b", "byte", "bytes"), 1),
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{
        f"{letter}{ending}": 1024**power
        for power, letter in enumerate("kmgt", start=1)
        for ending in ("ib", "i", "")
    },
}
_NUMBER = r"((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
_BYTES = re.compile(rf"{_NUMBER}\s*([a-z]+)", re.IGNORECASE)
_PART = re.compile(rf"{_NUMBER}\s*(%)|(0?\.[0-9]+|1\.0*)")


def parse_duration(text: str | timedelta) -> timedelta:
    """Turn `90s`, `30min`, `1.5h` or `2d` into a time span.

    Raises:
        ConfigError: the unit is missing or unknown, or the time span is not positive.
    """
    if isinstance(text, timedelta):
        duration = text
    else:
        match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(
                f"{text!r} is not a duration; write a number and one of the units s, min, h, d, "
                "such as '30min'."
            )
        duration = float(match[1]) * _UNITS[match[2]]
    if duration <= timedelta(0):
        raise ConfigError(f"the duration {text!r} is not positive.")
    return duration


def format_duration(duration: timedelta) -> str:
    """Write a time span as `parse_duration` reads it, in the largest unit that divides it."""
    for name, unit in reversed(_UNITS.items()):
        if not duration % unit:
            return f"{duration // unit}{name}"
    return f"{duration / _UNITS['s']:f}s"


def parse_bytes(value: str | int) -> int:
    """Turn `256MiB` or `256M` (1024 * 1024 bytes each), `60GB` (10**9 each) or an integer into bytes.

    Fractions of a byte are dropped: `1.3GiB` is 1,395,864,371 bytes.

    Raises:
        ConfigError: the unit is missing or unknown, or the number is negative or less than a byte.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _BYTES_PER_UNIT.get(match[2].lower()) if match else None
    num_bytes = Fraction(match[1]) * unit if match and unit else Fraction(-1)
    if num_bytes < 0 or 0 < num_bytes < 1:
        raise ConfigError(
            f"{value!r} is not a number of bytes; write a number and one of the units KiB, MiB, GiB, TiB or K, M, G, T "
            "(1024 each), KB, MB, GB, TB (1000 each) or B, such as '256MiB', '1.5G' or '60GB', or a whole number."
        )
    return int(num_bytes)


def parse_bytes_or_fraction(value: str | int | float) -> int | float:
    """Turn `60GiB` or an integer into bytes, `80%` into 0.8, and leave a fraction such as 0.85 as it is.

    Raises:
        ConfigError: the value is neither, or a fraction that is not above 0 and at most 1.
    """
    part = _part(value)
    if part is None:
        try:
            return parse_bytes(value)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(
                f"{error} Or a part of the device's memory, such as '80%' or 0.8."
            ) from None
    if not 0 < part <= 1:
        raise ConfigError(
            f"{value!r} is not a fraction of the device's memory; write a number above 0 and at most 1, such as 0.8 or "
            "'80%', or bytes, such as '60GiB'."
        )
    return part


def _part(value: str | int | float) -> float | None:
    """Return the value of a fraction or a percentage; None for anything else."""
    if isinstance(value, float):
        return value
    match = _PART.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    return float(Fraction(match[1]) / 100 if match[2] else Fraction(match[3]))
