"""How single values and whole files are read, and the words with which they are refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from thunder_memsave.config import ShardingConfig
from thunder_memsave.settings import (
    ConfigError,
    load_yaml,
    parse_bytes,
    parse_duration,
    parse_section,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_string_sets_the_first_field() -> None:
    assert parse_section(ShardingConfig, "none", where="sharding") == ShardingConfig(mode="none")


def test_a_mapping_none_and_a_section_are_accepted() -> None:
    section = ShardingConfig(mode="none")
    assert parse_section(ShardingConfig, {"mode": "none"}, where="sharding") == section
    assert parse_section(ShardingConfig, section, where="sharding") is section
    assert parse_section(ShardingConfig, None, where="sharding") == ShardingConfig(mode="zero2")


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    message = r"sharding has no key 'mod'; did you mean 'mode'\? Its keys are mode, size\."
    with pytest.raises(ConfigError, match=message):
        parse_section(ShardingConfig, {"mod": "none"}, where="sharding")


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
    [("60GiB", 60 * 2**30), (" 256 MB ", 256 * 10**6), ("1.5KiB", 1536), ("7B", 7), (0, 0)],
)
def test_bytes_have_a_unit_or_are_a_whole_number(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["60", "60gib", "60Gi", "-1KiB", "0.3B", "GiB", "", -1, 1.5, True])
def test_other_numbers_of_bytes_are_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match="is not a number of bytes; write a number and one of"):
        parse_bytes(text)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "strategy:\n  sharding: none\n  sharding: zero2\n")
    with pytest.raises(ConfigError, match="the key 'sharding' is given twice, on lines 2 and 3"):
        load_yaml(path)


def test_a_merge_may_override_what_it_merges(tmp_path: Path) -> None:
    path = write(tmp_path, "base: &base {a: 1, b: 2}\nrun: {<<: *base, b: 3}\n")
    assert load_yaml(path)["run"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "but must be a mapping of names"),
        ("a: [", "cannot read the configuration"),
        ("a: !!python/object/apply:os.getcwd []", "cannot read the configuration"),
    ],
)
def test_a_file_that_is_no_plain_mapping_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_yaml(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent\.yaml"):
        load_yaml(tmp_path / "absent.yaml")
