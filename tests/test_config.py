"""What the configuration accepts, and the words with which it refuses the rest."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from thunder_memsave.config import (
    CompileConfig,
    ConfigError,
    Fp8Config,
    MemoryConfig,
    ShardingConfig,
    StrategyConfig,
    StrategySection,
    StrategySections,
    load_strategy_config,
)
from thunder_memsave.settings.problems import ConfigErrors
from thunder_memsave.settings.schema import parse_section
from thunder_memsave.settings.value_kinds import Bytes, BytesOrFraction


def parse_strategy(values: object) -> StrategySection:
    return parse_section(StrategySection, values, where="strategy")


def parse_memory(values: object) -> MemoryConfig:
    return parse_section(MemoryConfig, values, where="memory")


def parse_fp8(values: object) -> Fp8Config:
    return parse_section(Fp8Config, values, where="fp8")


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sharding", "zero1", r"strategy\.sharding is 'zero1', but must be one of 'none', "),
        (
            "sharding",
            None,
            r"strategy\.sharding is null, but must be one of 'none', .*; leave it out",
        ),
        ("sharding", 2, r"strategy\.sharding is 2, but must be one of 'none', .* or a mapping"),
        ("sharding", {"mode": "zero"}, r"must be one of .*; did you mean 'zero3'\?"),
        ("leave_out", [1], r"strategy\.leave_out is \[1\], but must be a list of names"),
        ("trace_dir", 3, r"strategy\.trace_dir is 3, but must be a text"),
        ("trace_dir", "", r"strategy\.trace_dir is '', but must be a text"),
        ("leave_out", "regather", r"leave_out is 'regather', but must be a list of names"),
        (
            "leave_out",
            ["regather", "scedule"],
            r"strategy\.leave_out has 'scedule', but no step is called so; did you mean 'schedule'\? The steps that "
            r"can be left out are leave_out_zeros, join_views, merge_equal, gather_in_compute_dtype, gather_in_fp8, "
            r"add_embedding_gradients, tile_rows, regather, recompute_in_kernels, schedule, add_gradients, "
            r"update_in_place, "
            r"write_in_place\.$",
        ),
        (
            "leave_out",
            ["prefetch"],
            r"has 'prefetch', but no step is called so\. The steps that can be left out are leave_out_zeros, "
            r"join_views, merge_equal, ",
        ),
        (
            "leave_out",
            ["plan"],
            r"strategy\.leave_out has 'plan', which cannot be left out: without it, nothing keeps the step within "
            r"`memory\.budget`; `memory\.policy` has other plans\. The steps that can be left out are "
            r"leave_out_zeros, join_views, ",
        ),
        ("timeout", 30, r"strategy\.timeout: 30 is not a duration; write a number and one"),
        ("timeout", None, r"strategy\.timeout is null, but must be a duration; leave it out"),
        ("state_dict_type", True, r"state_dict_type is true, but must be 'sharded' or 'full'"),
        ("prefech", 1, r"strategy\.prefech is not a key of 'strategy'; did you mean 'prefetch'\?"),
        ("compile", {}, r"strategy\.compile is not a key of 'strategy'"),
        (
            "window",
            "auto",
            r"strategy\.window is not a key.*; its keys are accumulate, bucket, cuda_graphs, fullgraph",
        ),
        (
            "sharding",
            {"mode": "hybrid", "size": 0},
            r"strategy\.sharding\.size is 0, but must be a whole number of at least 1",
        ),
        (
            "sharding",
            {"mode": "hybrid", "size": "eight"},
            r"strategy\.sharding\.size is 'eight', but must be a whole number or null",
        ),
        (
            "sharding",
            {"mode": "zero3", "size": 8},
            r"sharding\.size is 8, and has no effect with sharding\.mode 'zero3'; leave it out, or",
        ),
        ("prefetch", "256", r"strategy\.prefetch: '256' is not a number of bytes; write a number"),
        ("prefetch", "256MiBs", r"or '60GB', or a whole number\. Or write 'auto'\."),
        ("prefetch", None, r"prefetch is null, but must be 'auto' or bytes, such as 256MiB; leave"),
        ("bucket", -1, r"strategy\.bucket: -1 is not a number of bytes"),
        (
            "accumulate",
            "unsharded",
            r"accumulate is 'unsharded', but must be one of 'auto', 'reduc",
        ),
        (
            "reduce_dtype",
            "bfloat16",
            r"reduce_dtype is 'bfloat16', but must be 'float32' or null; did you mean 'float32'",
        ),
    ],
)
def test_a_wrong_strategy_setting_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_strategy({key: value})


def test_the_dataclasses_refuse_wrong_values_too() -> None:
    with pytest.raises(ConfigError, match=r"ShardingConfig\.mode is 'zero1'"):
        ShardingConfig(mode="zero1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"StrategyConfig\.timeout: the duration .* positive"):
        StrategyConfig(timeout=timedelta(0))


def test_users_write_words_and_units() -> None:
    config = parse_strategy(
        {
            "sharding": {"mode": "hybrid", "size": 8},
            "prefetch": "256MiB",
            "accumulate": "accumulate_unsharded",
            "bucket": 0,
            "reduce_dtype": None,
            "trace_dir": "traces",
            "leave_out": ["schedule"],
            "timeout": "90s",
            "state_dict_type": "full",
        }
    )
    assert config == StrategySection(
        sharding=ShardingConfig(mode="hybrid", size=8),
        prefetch=Bytes(256 * 1024**2),
        accumulate="accumulate_unsharded",
        bucket=Bytes(0),
        reduce_dtype=None,
        trace_dir="traces",
        leave_out=("schedule",),
        timeout=timedelta(seconds=90),
        state_dict_type="full",
    )


def test_all_problems_of_the_strategy_are_found_together() -> None:
    values = {"sharding": "zero9", "trace_dir": 2, "leave_out": 1, "timeout": 3, "jit": True}
    with pytest.raises(ConfigErrors) as error:
        parse_strategy(values)
    keys = {problem.key for problem in error.value.problems}
    assert keys == {
        "strategy.sharding",
        "strategy.trace_dir",
        "strategy.leave_out",
        "strategy.timeout",
        "strategy.jit",
    }


def test_the_strategy_is_a_configuration_of_its_compiler_and_has_all_settings_together() -> None:
    strategy = StrategySection(sharding=ShardingConfig(mode="zero3"), trace_dir="traces")
    memory, fp8 = MemoryConfig(policy="keep_all"), Fp8Config(recipe="block")
    config = StrategySections(strategy=strategy, memory=memory, fp8=fp8).together
    assert isinstance(config, CompileConfig)
    assert (config.sharding.mode, config.trace_dir) == ("zero3", "traces")
    assert (config.memory, config.fp8) == (memory, fp8)


def test_no_strategy_section_means_the_defaults(tmp_path: Path) -> None:
    assert load_strategy_config(write(tmp_path, "strategy:\nmemory:\n")) == StrategyConfig()
    assert StrategyConfig().timeout == timedelta(minutes=30)


def test_the_run_file_is_read_without_the_sections_of_the_command(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: {name_or_path: here}\nstrategy: {sharding: none, timeout: 5min}\nfp8: null\n",
    )
    config = load_strategy_config(path)
    assert config.sharding.mode == "none"
    assert config.timeout == timedelta(minutes=5)


def test_an_empty_run_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_strategy_config(write(tmp_path, "")) == StrategyConfig()


def test_the_fp8_section_stands_beside_the_strategys(tmp_path: Path) -> None:
    assert load_strategy_config(write(tmp_path, "strategy: {}")).fp8 is None
    assert load_strategy_config(write(tmp_path, "fp8: {}")).fp8 == Fp8Config()
    with pytest.raises(ConfigError, match=r"fp8\.recipes is not a key of 'fp8'"):
        load_strategy_config(write(tmp_path, "fp8: {recipes: delayed}"))


def test_the_memory_section_stands_beside_the_strategys(tmp_path: Path) -> None:
    config = load_strategy_config(write(tmp_path, "memory: {budget: 60GiB, keep: ['*.mlp']}"))
    assert config.memory == MemoryConfig(budget=BytesOrFraction(60 * 1024**3), keep=("*.mlp",))
    with pytest.raises(ConfigError, match=r"strategy\.memory is not a key of 'strategy'"):
        load_strategy_config(write(tmp_path, "strategy: {memory: {budget: 60GiB}}"))


@pytest.mark.parametrize(
    ("memory", "device", "budget"),
    [
        ({}, None, None),
        ({}, 1000, 950),
        ({"reserve": 100}, 1000, 900),
        ({"reserve": 0}, 1000, 1000),
        ({"reserve": 0.5}, 1000, 500),
        ({"budget": 0.85}, 1000, 850),
        ({"budget": 1.0}, 1000, 1000),
        ({"budget": "1KiB"}, None, 1024),
        ({"budget": "1.3GiB"}, None, 1_395_864_371),
        ({"budget": "80%"}, 1000, 800),
        ({"budget": "80%"}, 1001, 800),
        ({"reserve": "5%"}, 1000, 950),
        ({"reserve": "1K"}, 4096, 3072),
        ({"budget": 700}, 1000, 700),
        ({"policy": "keep_all"}, 1000, None),
        ({"policy": "recompute_all"}, 1000, None),
    ],
)
def test_the_budget_in_bytes(memory: dict[str, Any], device: int | None, budget: int) -> None:
    assert parse_memory(memory).budget_bytes(device) == budget


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            {"budget": 1.5},
            r"memory\.budget: 1\.5 is not a fraction .* at most 1, .* Or write 'auto'",
        ),
        ({"budget": "60GiBs"}, r"memory\.budget: '60GiBs' is not a number of bytes"),
        ({"budget": -1}, r"memory\.budget: -1 is not a number of bytes"),
        ({"budget": 0}, r"memory\.budget is 0, in which no step fits; write the bytes"),
        ({"reserve": 2.0}, r"memory\.reserve: 2\.0 is not a fraction"),
        ({"polic": "plan"}, r"memory\.polic is not a key of 'memory'; did you mean 'policy'"),
        ({"policy": "full"}, r"memory\.policy is 'full', but must be one of 'plan', 'keep_all', "),
        ({"keep": "mlp"}, r"memory\.keep is 'mlp', but must be a list of names"),
        (
            {"policy": "keep_all", "budget": "1GiB"},
            r"memory\.budget is 1073741824, and has no effect where memory\.policy is 'keep_all'; leave one",
        ),
        (
            {"budget": "1GiB", "reserve": 0.1},
            r"memory\.reserve is 0\.1, and has no effect where memory\.budget is given",
        ),
        (
            {"policy": "keep_all", "keep": ["*"]},
            r"memory\.keep is \('\*',\), and has no effect where memory\.policy is 'keep_all'",
        ),
        (
            {"policy": "recompute_all", "recompute": ["*"]},
            r"memory\.recompute is .* no effect where memory\.policy is 'recompute_all'",
        ),
        (
            {"policy": "keep_all", "limits": "reserved"},
            r"memory\.limits is 'reserved', and has no effect where memory\.policy is 'keep_all'",
        ),
        (
            {"limits": "cache"},
            r"memory\.limits is 'cache', but must be one of 'auto', 'tensors', 'reserved'\.",
        ),
        ([], r"memory is \[\], but must be a mapping"),
    ],
)
def test_what_is_wrong_with_the_memory_section_is_named(memory: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_memory(memory)
    assert (error.value.key or "memory").startswith("memory")


def test_a_budget_that_the_device_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory\.budget is 0\.5, a fraction .* write bytes"):
        parse_memory({"budget": 0.5}).budget_bytes(None)
    with pytest.raises(ConfigError, match=r"memory\.limits is 'reserved', but this is the CPU"):
        parse_memory({"budget": "1GiB", "limits": "reserved"}).budget_bytes(None)
    with pytest.raises(ConfigError, match=r"is 2,000 bytes, but the device has 1,000; write less"):
        parse_memory({"budget": 2000}).budget_bytes(1000)
    with pytest.raises(ConfigError, match=r"memory\.reserve is 1000, which leaves nothing of"):
        parse_memory({"reserve": 1000}).budget_bytes(1000)


def test_a_budget_is_of_what_others_leave_of_the_device() -> None:
    auto = parse_memory({"reserve": "10%"})
    assert auto.budget_bytes(1000, available_bytes=1000) == auto.budget_bytes(1000) == 900
    assert auto.budget_bytes(1000, available_bytes=700) == 600
    assert parse_memory({"budget": "50%"}).budget_bytes(1000, available_bytes=700) == 500
    held = r", of which other programs and CUDA hold 300"
    with pytest.raises(ConfigError, match=f"is 800 bytes, but the device has 1,000{held}; write"):
        parse_memory({"budget": "80%"}).budget_bytes(1000, available_bytes=700)
    with pytest.raises(ConfigError, match=rf"leaves nothing of the device's 1,000 bytes{held}; wr"):
        parse_memory({"reserve": 700}).budget_bytes(1000, available_bytes=700)


def test_the_strategys_and_the_memory_sections_problems_come_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as error:
        load_strategy_config(write(tmp_path, "strategy: {sharding: zero9}\nmemory: {budget: much}"))
    keys = [problem.key for problem in error.value.problems]
    assert keys == ["strategy.sharding", "memory.budget"]


def test_a_misspelled_section_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "stratgy: {sharding: none}")
    with pytest.raises(ConfigError, match=r"no section 'stratgy'; did you mean 'strategy'\?"):
        load_strategy_config(path)


def test_the_configuration_imports_no_torch() -> None:
    script = "import sys, thunder_memsave.config as c; sys.exit('torch' in sys.modules)"
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "fast"}, r"fp8\.recipe is 'fast', but must be one of 'delayed', "),
        ({"backend": "te"}, r"fp8\.backend is 'te', but must be one of 'auto', "),
        ({"fp8_format": "E5M2"}, r"fp8_format is 'E5M2', but must be 'HYBRID' or 'E4M3' or null"),
        ({"margin": -1}, r"fp8\.margin is -1, but must be a whole number of at least 0\."),
        ({"margin": True}, r"fp8\.margin is true, but must be a whole number\."),
        (
            {"amax_history_len": 0},
            r"fp8\.amax_history_len is 0, but must be a whole number of at le",
        ),
        ({"reduce_amax": "yes"}, r"fp8\.reduce_amax is 'yes', but must be true or false\."),
        ({"reduce_amax": 1}, r"fp8\.reduce_amax is 1, but must be true or false\."),
        (
            {"skip_modules": "lm_head"},
            r"fp8\.skip_modules is 'lm_head', but must be a list of names",
        ),
        ({"amax_len": 4}, r"fp8\.amax_len is not a key of 'fp8'"),
        ("delayed", r"fp8 is 'delayed', but must be a mapping of names to values\."),
    ],
)
def test_what_is_wrong_with_fp8_is_named(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_fp8(values)


@pytest.mark.parametrize(
    "option",
    [
        {"amax_history_len": 16},
        {"amax_compute_algo": "most_recent"},
        {"margin": 1},
        {"reduce_amax": False},
    ],
)
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_fp8_options_that_a_recipe_does_not_have_are_refused(
    option: dict[str, Any], recipe: str
) -> None:
    (name,) = option
    message = (
        rf"fp8\.{name} is .*, and has no effect with fp8\.recipe '{recipe}', which keeps no his"
    )
    with pytest.raises(ConfigError, match=message) as error:
        parse_fp8({"recipe": recipe, **option})
    assert error.value.key == f"fp8.{name}"
    assert parse_fp8({"recipe": "delayed", **option})


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_frozen_weights_in_a_recipe_of_blackwell_alone_are_refused(recipe: str) -> None:
    message = (
        rf"^fp8\.frozen_weights is 'fp8' and fp8\.recipe is '{recipe}', whose backward casts the weight itself, along "
        r"its other dim; leave frozen_weights out, or set the recipe to 'delayed', 'current' or 'block'\.$"
    )
    with pytest.raises(ConfigError, match=message) as error:
        parse_fp8({"recipe": recipe, "frozen_weights": "fp8"})
    assert error.value.key == "fp8.frozen_weights"
    assert parse_fp8({"recipe": "block", "frozen_weights": "fp8"})


def test_a_format_of_8_bits_in_nvfp4_is_refused() -> None:
    message = r"^fp8\.fp8_format is 'HYBRID' and fp8\.recipe is 'nvfp4', of which all numbers are E2M1; leave it out\.$"
    with pytest.raises(ConfigError, match=message) as error:
        parse_fp8({"recipe": "nvfp4", "fp8_format": "HYBRID"})
    assert error.value.key == "fp8.fp8_format"
    assert parse_fp8({"recipe": "nvfp4", "fp8_format": "E4M3"})


def test_no_fp8_section_and_an_empty_one_are_not_the_same() -> None:
    assert StrategySections().fp8 is None
    assert parse_fp8({}) == Fp8Config()
    config = Fp8Config(recipe="current")
    assert parse_fp8(config) is config
    assert parse_fp8({"skip_modules": ["a", "b.*"], "margin": 0}) == Fp8Config(
        skip_modules=("a", "b.*")
    )
