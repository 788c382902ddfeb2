"""The settings of the strategy as frozen dataclasses, and how a run's YAML file sets them."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from thunder_memsave.settings.section import (
    Bytes,
    BytesOrFraction,
    ConfigError,
    Section,
    Whole,
    field_names,
    parse_bytes,
    parse_duration,
    parse_section,
    raise_all,
    require_mapping,
    suggestion,
    unknown_keys,
)
from thunder_memsave.settings.step_names import refuse_needed
from thunder_memsave.settings.yaml_file import load_yaml

__all__ = [
    "CompileConfig",
    "ConfigError",
    "Fp8Config",
    "MemoryConfig",
    "ShardingConfig",
    "StrategyConfig",
    "load_strategy_config",
    "load_yaml",
    "parse_bytes",
    "parse_duration",
    "parse_fp8",
    "parse_memory",
    "parse_section",
    "parse_strategy",
]

# Sections of the run file that the strategy reads; the others belong to the fine-tuning command.
_OUR_SECTIONS = ("strategy", "memory", "fp8")

# The strategy's own sections: keys of `compile` stand among its own, `memory` and `fp8` beside it.
_NOT_FLAT = ("compile", "memory", "fp8")

_RESERVE = BytesOrFraction(0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingConfig(Section):
    """How parameters, gradients and optimizer state are divided over the ranks."""

    mode: Literal["none", "zero2", "zero3", "hybrid", "auto"] = "zero2"
    """`none` keeps replicas and all-reduces gradients; `zero2` shards parameters, gradients and
    optimizer state, and keeps gathered weights from forward to backward where `memory.budget` has
    room; `zero3` gathers them again in backward; `hybrid` is `zero3` within a group of ranks and
    `none` across the groups; `auto` keeps those weights that save the most time for the budget's
    bytes and gathers the others again, and is `zero3` without a budget."""

    size: int | None = None
    """Ranks per group of `hybrid`; None takes those of one node."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.size is not None and self.mode != "hybrid":
            raise ConfigError(
                f"sharding.size is {self.size}, and has no effect with sharding.mode {self.mode!r}; "
                "leave it out, or set the mode to 'hybrid'.",
                key="strategy.sharding.size",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig(Section):
    """How a module becomes compiled graphs."""

    frontend: Literal["dynamo", "interpreter"] = "dynamo"
    """`dynamo` captures with torch's guards; `interpreter` is Thunder's own, slower one."""

    executors: tuple[str, ...] | None = None
    """Names of Thunder executors in order of preference; None takes the defaults."""

    trace_dir: str | None = None
    """A directory that gets the trace after each step of a compilation, for those who debug: a folder
    for each rank, and in that one for each capture."""

    leave_out: tuple[str, ...] = ()
    """Steps of a compilation that are not done, for an experiment: `out_of_place`,
    `gather_in_compute_dtype`, `regather`, `schedule`. Gradients stay the same; memory and time do not."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        raise_all(list(refuse_needed(self.leave_out, key="strategy.leave_out")))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig(Section):
    """How much device memory a training step may take, and what backward keeps from forward."""

    budget: BytesOrFraction | Literal["auto"] = "auto"
    """The most that tensors may take on each device: bytes, or a part of what the device has, `80%`
    or `0.8`; `auto` is all that it has less `reserve`. On the CPU, bytes only, and `auto` sets no limit."""

    policy: Literal["plan", "keep_all", "recompute_all"] = "plan"
    """`plan` computes again in backward what must be to stay within the budget, where that costs
    least time; `keep_all` only what is free, such as views and casts; `recompute_all` all within a
    layer. The last two have no budget."""

    reserve: BytesOrFraction = _RESERVE
    """What `budget: auto` leaves to fragmentation and other libraries: bytes, or a part of what
    the device has."""

    keep: tuple[str, ...] = ()
    """Names of modules, or patterns such as `*.mlp.down_proj`: what they and the modules within
    them compute is kept for backward."""

    recompute: tuple[str, ...] = ()
    """The same for what is computed again in backward instead."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.budget != "auto" and not self.budget:
            raise ConfigError(
                "memory.budget is 0, in which no step fits; write the bytes that tensors may take, such as '60GiB', "
                "or 'auto'.",
                key="memory.budget",
            )
        _refuse_without_effect(self)

    def budget_bytes(self, device_total_bytes: int | None) -> int | None:
        """The most that tensors may take on a device, in bytes.

        Args:
            device_total_bytes: What the device has; None for the CPU, whose memory is not a limit
                that is planned for.

        Returns:
            None where there is no limit.

        Raises:
            ConfigError: the budget is a fraction of what is not known, or more than the device has.
        """
        if self.policy != "plan":
            return None
        if self.budget == "auto":
            return device_total_bytes and device_total_bytes - self._reserve_bytes(
                device_total_bytes
            )
        if isinstance(self.budget, float):
            return self._fraction_bytes(self.budget, device_total_bytes)
        if device_total_bytes is not None and self.budget > device_total_bytes:
            raise ConfigError(
                f"memory.budget is {self.budget:,} bytes, but the device has {device_total_bytes:,}; write less, or "
                "'auto'.",
                key="memory.budget",
            )
        return int(self.budget)

    def _fraction_bytes(self, fraction: float, device_total_bytes: int | None) -> int:
        if device_total_bytes is None:
            raise ConfigError(
                f"memory.budget is {fraction}, a fraction of the device's memory, but this is the CPU, which shares "
                "its memory with everything else; write bytes, such as '4GiB', or 'auto' for no limit.",
                key="memory.budget",
            )
        return int(fraction * device_total_bytes)

    def _reserve_bytes(self, device_total_bytes: int) -> int:
        fraction = isinstance(self.reserve, float)
        reserve = int(self.reserve * device_total_bytes) if fraction else int(self.reserve)
        if reserve >= device_total_bytes:
            raise ConfigError(
                f"memory.reserve is {self.reserve}, which leaves nothing of the device's {device_total_bytes:,} bytes; "
                "write less.",
                key="memory.reserve",
            )
        return reserve


def _refuse_without_effect(memory: MemoryConfig) -> None:
    """Refuse what the other keys make meaningless."""
    default = {field.name: field.default for field in dataclasses.fields(MemoryConfig)}
    unused = {
        "budget": memory.policy != "plan",
        "reserve": memory.policy != "plan" or memory.budget != "auto",
        "keep": memory.policy == "keep_all",
        "recompute": memory.policy == "recompute_all",
    }
    for name, is_unused in unused.items():
        value = getattr(memory, name)
        if is_unused and value != default[name]:
            reason = (
                f"policy is {memory.policy!r}" if memory.policy != "plan" else "budget is given"
            )
            raise ConfigError(
                f"memory.{name} is {value!r}, and has no effect where memory.{reason}; leave one of them out.",
                key=f"memory.{name}",
            )


_NO_MARGIN = Whole(0)

# Keys of fp8 that recipes other than `delayed` have no use for.
_OF_DELAYED = ("amax_history_len", "amax_compute_algo", "margin", "reduce_amax")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config(Section):
    """Which linear layers compute in 8-bit floating point, and how; `{}` takes the defaults."""

    backend: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Whose kernels run: TransformerEngine's, which the extra `te` installs, or PyTorch's own; `auto`
    takes TransformerEngine's where it is installed and there is a CUDA device."""

    recipe: Literal["delayed", "current", "block", "mxfp8", "nvfp4"] = "delayed"
    """How numbers are scaled into the range of fp8: `delayed` by what each tensor was in earlier
    steps, `current` by what it is, `block` by what 1x128 (weights: 128x128) of its elements are;
    `mxfp8` and `nvfp4` need a Blackwell GPU and are refused in this version."""

    fp8_format: Literal["HYBRID", "E4M3"] | None = None
    """`E4M3` for all tensors, or `HYBRID`: gradients are E5M2, with more range and less precision;
    null is `HYBRID` for the recipes `delayed` and `current`, `E4M3` for the others."""

    amax_history_len: int = 1024
    """Steps that the recipe `delayed` looks back."""

    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """What `delayed` takes of those steps: the largest magnitude, or that of the step before."""

    margin: Whole = _NO_MARGIN
    """`delayed` scales 2**margin lower than what would just fit, for tensors that grow quickly."""

    reduce_amax: bool = True
    """Whether `delayed` uses the largest magnitude on all ranks, so that all scale alike; false is for
    one rank, and refused with more."""

    skip_modules: tuple[str, ...] = ("lm_head",)
    """Names of modules, or patterns such as `*.gate`, whose linear layers do not run in fp8: the
    whole name or its end."""

    frozen_weights: Literal["compute", "fp8"] = "compute"
    """What is kept of weights that are not trained, of linear layers that run in fp8: `compute` keeps
    them as they are, and a copy in fp8 to compute with; `fp8`, their fp8 numbers alone, half the bytes
    of bfloat16, also where ranks gather them."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.recipe != "delayed":
            _refuse_options_of_delayed(self)


def _refuse_options_of_delayed(fp8: Fp8Config) -> None:
    default = {field.name: field.default for field in dataclasses.fields(Fp8Config)}
    for name in _OF_DELAYED:
        value = getattr(fp8, name)
        if value != default[name]:
            raise ConfigError(
                f"fp8.{name} is {value!r}, and has no effect with fp8.recipe {fp8.recipe!r}, which keeps no history of "
                "magnitudes; leave it out, or set the recipe to 'delayed'.",
                key=f"fp8.{name}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig(Section):
    """Everything that `ThunderMemsaveStrategy` can be told through YAML."""

    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    fp8: Fp8Config | None = None

    prefetch: Bytes | Literal["auto"] = "auto"
    """Bytes of gathered weights on their way beside those that are read, and of gradients whose
    reduction may still run (half of it), as far as `memory.budget` has room; `auto` is twice the
    model's largest block, 0 overlaps nothing."""

    accumulate: Literal["auto", "reduce_every", "accumulate_unsharded"] = "auto"
    """What a backward inside `fabric.no_backward_sync` does: `reduce_every` reduces its gradients
    at once and keeps shards, `accumulate_unsharded` keeps whole gradients in float32 and leaves
    the reduction to the first backward outside; `auto` is `accumulate_unsharded` where whole
    gradients take at most a tenth of `memory.budget`, else, and without a budget, `reduce_every`."""

    bucket: Bytes | Literal["auto"] = "auto"
    """Parameters of at most so many bytes share collectives with their neighbours; 0 gives each
    parameter collectives of its own."""

    reduce_dtype: Literal["float32"] | None = "float32"
    """Gradients of fewer bits are summed over the ranks in this type; None sums them as they are."""

    nonfinite_gradients: Literal["ignore", "skip", "stop"] = "ignore"
    """What a step does whose gradients are infinite or not a number on any rank: `ignore` takes it;
    `skip` leaves parameters and optimizer state alone on every rank, and logs a warning; `stop`
    raises an error on every rank. Under `skip`, clipping to a norm raises nothing either."""

    timeout: timedelta = timedelta(minutes=30)
    """How long a collective may wait for the other ranks; users write `30min`. On gloo it fails
    with a message then; on nccl torch's watchdog logs one, and ends the process."""

    state_dict_type: Literal["sharded", "full"] = "sharded"
    """What `fabric.save` writes: one directory of shards, or one file with full tensors."""


def load_strategy_config(path: str | Path) -> StrategyConfig:
    """Read the `strategy`, `memory` and `fp8` parts of a run's YAML file.

    Raises:
        ConfigError: the file cannot be read, or one of the three parts is wrong.
    """
    sections = load_yaml(path)
    for name in sections:
        _refuse_misspelled_section(name, path)
    return parse_strategy(
        sections.get("strategy"), memory=sections.get("memory"), fp8=sections.get("fp8")
    )


def parse_memory(values: object, *, where: str = "memory") -> MemoryConfig:
    """Build the section `memory`; None, or a mapping without keys, means the defaults.

    Raises:
        ConfigError: a key is unknown, has a value of the wrong kind, or no effect beside the others.
    """
    if isinstance(values, MemoryConfig):
        return values
    given = require_mapping({} if values is None else values, where=where)
    return parse_section(MemoryConfig, given, where=where)


def parse_fp8(values: object, *, where: str = "fp8") -> Fp8Config | None:
    """Build the section `fp8`.

    Args:
        values: A mapping, or a ready section; an empty mapping asks for fp8 with its defaults.
        where: The section's name in messages.

    Returns:
        None for None: nothing runs in fp8.

    Raises:
        ConfigError: a key is unknown, has a value of the wrong kind, or no effect beside the others.
    """
    if values is None or isinstance(values, Fp8Config):
        return values
    return parse_section(Fp8Config, require_mapping(values, where=where), where=where)


def parse_strategy(
    values: object, *, where: str = "strategy", memory: object = None, fp8: object = None
) -> StrategyConfig:
    """Build the configuration from the flat keys that YAML uses.

    Args:
        values: The keys of the section `strategy`.
        where: The section's name in messages.
        memory: The section `memory`, which the run file has beside it.
        fp8: The section `fp8`, beside it too; None runs nothing in fp8.

    Raises:
        ConfigError: a key is unknown or has a value of the wrong kind.
    """
    given = require_mapping({} if values is None else values, where=where)
    compile_keys = field_names(CompileConfig)
    own_keys = [name for name in field_names(StrategyConfig) if name not in _NOT_FLAT]
    problems = list(unknown_keys(given, known=[*own_keys, *compile_keys], where=where))
    if "sharding" in given and given["sharding"] is None:
        # Taking the default here would shard for somebody who wrote null for "none".
        message = f"{where}.sharding is null; write 'none' or 'zero3', or leave it out."
        problems.append(ConfigError(message, key=f"{where}.sharding"))
    section: dict[str, Any] = {name: given[name] for name in own_keys if name in given}
    compile_values = {name: given[name] for name in compile_keys if name in given}
    try:
        section["compile"] = parse_section(CompileConfig, compile_values, where=where)
    except ConfigError as error:
        problems.append(error)
    try:
        section["memory"] = parse_memory(memory)
    except ConfigError as error:
        problems.append(error)
    try:
        section["fp8"] = parse_fp8(fp8)
    except ConfigError as error:
        problems.append(error)
    try:
        config = parse_section(StrategyConfig, section, where=where)
    except ConfigError as error:
        problems.append(error)
    raise_all(problems)
    return config


def _refuse_misspelled_section(name: str, path: str | Path) -> None:
    if name in _OUR_SECTIONS:
        return
    # Other names are not ours to judge, but a near miss would silently train with the defaults.
    if difflib.get_close_matches(name, _OUR_SECTIONS, n=1, cutoff=0.75):
        raise ConfigError(f"{path} has no section {name!r}{suggestion(name, _OUR_SECTIONS)}")
