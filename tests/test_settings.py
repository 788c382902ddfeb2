"""How single values and whole files are read, and the words with which they are refused."""

from __future__ import annotations

from datetime import timedelta

import pytest

from thunder_memsave.config import CompileConfig, ShardingConfig
from thunder_memsave.settings import (
    ConfigError,
    ConfigErrors,
    parse_bytes,
    parse_duration,
    parse_section,
)


def test_a_string_sets_the_first_field() -> None:
    assert parse_section(ShardingConfig, "none", where="sharding") == ShardingConfig(mode="none")


def test_a_mapping_none_and_a_section_are_accepted() -> None:
    section = ShardingConfig(mode="none")
    assert parse_section(ShardingConfig, {"mode": "none"}, where="sharding") == section
    assert parse_section(ShardingConfig, section, where="sharding") is section
    assert parse_section(ShardingConfig, None, where="sharding") == ShardingConfig(mode="zero2")


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    message = r"^sharding\.mod is not a key of 'sharding'; did you mean 'mode'\?$"
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


def test_an_unknown_key_without_a_near_name_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match=r"'compile'; its keys are executors, frontend\.$"):
        parse_section(CompileConfig, {"xyz": 1}, where="compile")


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


def test_all_problems_of_a_section_are_found_together_each_with_its_key() -> None:
    values = {"frontend": "dynamos", "executors": 3, "executor": 4}
    with pytest.raises(ConfigErrors) as error:
        parse_section(CompileConfig, values, where="compile")
    keys = {problem.key for problem in error.value.problems}
    assert keys == {"compile.frontend", "compile.executors", "compile.executor"}
