from __future__ import annotations

import pytest

from thunder_memsave.config import CompileConfig, ShardingConfig, StrategySection
from thunder_memsave.settings.problems import ConfigError, ConfigErrors
from thunder_memsave.settings.schema import parse_section


def test_a_mapping_and_a_ready_section_are_accepted() -> None:
    section = ShardingConfig(mode="none")
    assert parse_section(ShardingConfig, {"mode": "none"}, where="sharding") == section
    assert parse_section(ShardingConfig, section, where="sharding") is section


def test_a_word_stands_for_the_section_that_has_it_first() -> None:
    config = parse_section(StrategySection, {"sharding": "none"}, where="strategy")
    assert config.sharding == ShardingConfig(mode="none")


def test_an_unknown_key_is_refused_with_the_nearest_name_or_with_all() -> None:
    message = r"^sharding\.mod is not a key of 'sharding'; did you mean 'mode'\?$"
    with pytest.raises(ConfigError, match=message):
        parse_section(ShardingConfig, {"mod": "none"}, where="sharding")
    message = r"'compile'; its keys are cuda_graphs, fullgraph, fusion, leave_out, return_logits, trace_dir\.$"
    with pytest.raises(ConfigError, match=message):
        parse_section(CompileConfig, {"xyz": 1}, where="compile")


def test_all_problems_of_a_section_are_found_together_each_with_its_key() -> None:
    values = {"cuda_graphs": "maybe", "leave_out": 3, "executors": 4}
    with pytest.raises(ConfigErrors) as error:
        parse_section(CompileConfig, values, where="compile")
    keys = {problem.key for problem in error.value.problems}
    assert keys == {"compile.cuda_graphs", "compile.leave_out", "compile.executors"}


def test_what_is_wrong_in_a_section_of_a_section_is_found_with_the_rest() -> None:
    values = {"sharding": {"mode": "zero9", "size": 0}, "timeout": "5"}
    with pytest.raises(ConfigErrors) as error:
        parse_section(StrategySection, values, where="strategy")
    keys = {problem.key for problem in error.value.problems}
    assert keys == {"strategy.sharding.mode", "strategy.sharding.size", "strategy.timeout"}


def test_a_section_made_in_python_is_checked_with_the_same_words() -> None:
    with pytest.raises(ConfigError) as made:
        CompileConfig(cuda_graphs="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as read:
        parse_section(CompileConfig, {"cuda_graphs": "maybe"}, where="CompileConfig")
    assert str(made.value) == str(read.value)
