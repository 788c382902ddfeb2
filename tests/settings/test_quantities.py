"""How durations and bytes are read, and the words with which they are refused."""

from __future__ import annotations

from datetime import timedelta

import pytest

from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.settings.quantities import (
    format_duration,
    parse_bytes,
    parse_bytes_or_fraction,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30min", 1800), ("1.5h", 5400), (" 2 d ", 172800)]
)
def test_durations_have_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["30", "30 minutes", "min", "-5s", "1h30min", ""])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration(text)


def test_a_zero_duration_is_refused() -> None:
    with pytest.raises(ConfigError, match="the duration '0s' is not positive"):
        parse_duration("0s")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("60GiB", 60 * 2**30),
        (" 256 MB ", 256 * 10**6),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("7 bytes", 7),
        (0, 0),
        ("0B", 0),
        ("1.3GiB", 1_395_864_371),  # and 0.2 of a byte
        ("1.9B", 1),
        (".5 kib", 512),
        *((text, 8 * 2**30) for text in ("8G", "8g", "8 G", "8.0G", "8GiB", "8gib", "8Gi")),
        *((text, 8 * 10**9) for text in ("8GB", "8 GB", "8gb")),
        *((text, 512 * 2**20) for text in ("512M", "512m", "512MiB", "0.5G")),
        ("2T", 2 * 2**40),
        ("3k", 3 * 2**10),
    ],
)
def test_bytes_have_a_unit_or_are_a_whole_number(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


NO_BYTES = [
    "60",
    "60GiBs",
    "12 parsecs",
    "8,5G",
    "-1KiB",
    "0.3B",
    "GiB",
    "1e3G",
    "1.G.",
    "\u0663G",
    "",
    -1,
    True,
]


@pytest.mark.parametrize("text", [*NO_BYTES, "80%", 1.5])
def test_other_numbers_of_bytes_are_refused(text: str | int) -> None:
    message = r"is not a number of bytes; write a number and one of .* such as '256MiB', '1\.5G' or"
    with pytest.raises(ConfigError, match=message):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, 0.8) for text in ("80%", " 80 % ", "80.0%", "0.8", ".8", 0.8)),
        *((text, 1.0) for text in ("100%", "1.0", 1.0)),
        ("12.5%", 0.125),
        ("1.3GiB", 1_395_864_371),
        ("8g", 8 * 2**30),
        (1, 1),
    ],
)
def test_a_part_of_a_whole_is_a_fraction_or_a_percentage(text: str | float, value: float) -> None:
    found = parse_bytes_or_fraction(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["120%", "0%", "0.0", 0.0, 1.5, -0.5])
def test_parts_that_are_none_are_refused(text: str | float) -> None:
    message = r"is not a fraction of the device's memory; .* such as 0\.8 or '80%', or bytes, such as '60GiB'"
    with pytest.raises(ConfigError, match=message):
        parse_bytes_or_fraction(text)


@pytest.mark.parametrize("text", [*NO_BYTES, "-5%", "%", "1.5"])
def test_what_is_neither_bytes_nor_a_part_is_refused_with_examples_of_both(text: str) -> None:
    message = (
        r"is not a number of bytes; .* Or a part of the device's memory, such as '80%' or 0\.8\.$"
    )
    with pytest.raises(ConfigError, match=message):
        parse_bytes_or_fraction(text)


@pytest.mark.parametrize("text", ["90s", "30min", "36h", "2d", "0.500000s"])
def test_a_duration_is_written_as_it_is_read(text: str) -> None:
    assert format_duration(parse_duration(text)) == text
