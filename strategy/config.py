"""Defines the strategy's settings as frozen dataclasses, and reads them from a run's YAML file."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, get_args

from thunder_memsave.settings.frozen_format import FrozenFormat
from thunder_memsave.settings.problems import ConfigError, raise_all, suggestion
from thunder_memsave.settings.schema import Section, field_names, parse_section
from thunder_memsave.settings.step_names import refuse_needed
from thunder_memsave.settings.value_kinds import Bytes, BytesOrFraction, Must, Positive, Whole
from thunder_memsave.settings.yaml_file import load_yaml

__all__ = [
    "CompileConfig",
    "ConfigError",
    "Fp8Config",
    "MemoryConfig",
    "ShardingConfig",
    "StrategyConfig",
    "StrategySection",
    "load_strategy_config",
]

_RESERVE = BytesOrFraction(0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingConfig(Section):
    """Sharding of parameters, gradients and optimizer state over the ranks."""

    shorthand = "mode"

    mode: Literal["none", "zero2", "zero3", "hybrid", "auto"] = "zero2"
    """`none` keeps replicas and all-reduces gradients; `zero2` shards parameters, gradients and
    optimizer state, and keeps gathered weights from forward to backward where `memory.budget` has
    room; `zero3` gathers them again in backward; `hybrid` is `zero3` within a group of ranks and
    `none` across the groups; `auto` keeps the gathered weights that save the most time per byte of
    the budget and gathers the others again, and is `zero3` without a budget."""

    size: Positive | None = None
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
    """Capture and compilation of modules."""

    trace_dir: Annotated[str, Must("be a text", bool)] | None = None
    """A directory that gets the trace after each step of a compilation: a folder for each rank and capture."""

    cuda_graphs: Literal["auto"] | bool = False
    """Launch forward and backward as one CUDA graph each: `auto` does so where the launches of a step take
    longer than its kernels and nothing forbids it; `true` is an error where something does. Other shapes of
    the batch run without. Off until a small model has been timed with it."""

    fusion: Literal["auto"] | bool = "auto"
    """Compile neighbouring operations that compute element by element to one kernel each, by PyTorch's
    inductor: `true` does so, with the same bits and at most the same memory; the first step takes seconds
    more for each kernel, the next run finds them on disk. `auto` does so on a GPU, where it took 4 to 10 %
    off a step of an H200, and not on a CPU, where it pays after thousands of steps alone."""

    fullgraph: bool = False
    """Refuse a `forward` that cannot be captured as one graph, with the line that prevents it, as fp8 and
    `cuda_graphs: true` do. Otherwise its own code is eager, and the submodules that it calls are compiled."""

    return_logits: bool = False
    """Whether a model that is given `labels=` computes the logits that it returns beside its loss. Otherwise they
    are made when they are first read, before the weights change and on one device; to differentiate them too,
    or read them on shards, set `true`."""

    leave_out: tuple[str, ...] = ()
    """Steps of a compilation that are not done, for an experiment: `gather_in_compute_dtype`, `gather_in_fp8`,
    `tile_rows`, `regather`, `schedule`, `add_gradients`, `update_in_place`. Gradients stay; memory and time do not."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        raise_all(list(refuse_needed(self.leave_out, key="strategy.leave_out")))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig(Section):
    """Budget of device memory for a training step, and the choice of activations to keep for backward."""

    budget: Literal["auto"] | BytesOrFraction = "auto"
    """Memory for tensors on each device: bytes, or a part of the device's memory, `80%` or `0.8`; `auto` is
    what other programs leave of it, less `reserve`. On the CPU, bytes only, and `auto` sets no limit."""

    policy: Literal["plan", "keep_all", "recompute_all"] = "plan"
    """`plan` recomputes activations in backward as far as the budget requires, in the least time;
    `keep_all` recomputes only what takes no time, views and values beside their readers in fused
    kernels; `recompute_all` recomputes all within a layer. The last two have no budget."""

    reserve: BytesOrFraction = _RESERVE
    """Memory that `auto` leaves to fragmentation and other libraries: bytes, or a part of the device's."""

    limits: Literal["auto", "tensors", "reserved"] = "auto"
    """The budget limits bytes of `tensors`, or the more bytes that PyTorch's allocator is
    simulated to have `reserved` for them; `auto` is `reserved` on CUDA, `tensors` on the CPU."""

    expandable_segments: bool = True
    """Let the segments grow in which PyTorch's allocator reserves memory on CUDA, so that less is lost
    between tensors. Settings of your own in `PYTORCH_CUDA_ALLOC_CONF` stay as they are."""

    keep: tuple[str, ...] = ()
    """Names of modules, or patterns such as `*.mlp.down_proj`: what is in them is kept for backward."""

    recompute: tuple[str, ...] = ()
    """Names of modules, or patterns, as for `keep`: their activations are recomputed in backward."""

    offload: Literal["auto", "none", "activations", "optimizer", "all", "fastest"] = "auto"
    """`activations` lets the plan copy activations to the host in forward, and back in backward, where
    that takes less time than recomputing them, or nothing else fits. `optimizer` keeps the states of optimizers
    on the host; `optimizer.step()` copies them in and out piece by piece. `all` is both. `fastest` lets the plan copy
    activations, and a part of the states where backward updates weights, wherever a step then takes less time.
    Copies run beside what computes. `auto` does so only where no plan fits otherwise, and never on the CPU. One small
    run on a GPU has tried it."""

    compress: Literal["none", "fp8"] = "none"
    """`fp8` lets the plan store what activation functions read in 8 bits from forward to backward, with a scale for 128
    elements, where that is quicker than to recompute it. The loss stays exact. Gradients are of numbers rounded by 1/16
    of themselves at most, so they are no longer those of eager PyTorch, and depend on the budget."""

    offload_weights: tuple[str, ...] = ()
    """Names of modules, or patterns such as `model.layers.1?`: their large frozen weights stay in page-locked memory
    of the host, and are copied to the device for each use, beside what computes. Of sharded ones this rank's rows."""

    optimizer_in_backward: Literal["auto"] | bool = False
    """Update each parameter in backward, as soon as its gradient is there, so that the gradients of all are never there
    at once. With the bits of `optimizer.step()`, which then has nothing left to do. For steps of one micro-batch
    whose gradients are not clipped, and models that are one graph. `auto` does so where no plan fits otherwise."""

    host_budget: Literal["auto"] | Bytes = "auto"
    """Memory of the host for `offload`, for each process: bytes; `auto` is half of what is free."""

    @property
    def may_offload(self) -> bool:
        """Whether it is left to the plan what goes to the host."""
        return self.offload in ("auto", "fastest") and self.policy == "plan"

    @property
    def offloads_activations(self) -> bool:
        """Whether plans may copy activations to the host."""
        return self.offload in ("activations", "all", "fastest")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the states of optimizers stay on the host."""
        return self.offload in ("optimizer", "all")

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.budget != "auto" and not self.budget:
            raise ConfigError(
                "memory.budget is 0, in which no step fits; write the bytes that tensors may take, such as '60GiB', "
                "or 'auto'.",
                key="memory.budget",
            )
        _refuse_without_effect(self)

    def budget_bytes(
        self, device_total_bytes: int | None, *, available_bytes: int | None = None
    ) -> int | None:
        """Return the bytes that a step may take on a device.

        Args:
            device_total_bytes: Memory of the device; None for the CPU, whose memory is not a limit
                that is planned for.
            available_bytes: What other programs and CUDA itself leave of it; None: all of it.

        Returns:
            Bytes; None if there is no limit.

        Raises:
            ConfigError: the budget is a fraction of an unknown memory, or more than the device has or has left; or
                it limits what is reserved on a device that reserves nothing.
        """
        if self.policy != "plan":
            return None
        if self.limits == "reserved" and device_total_bytes is None:
            raise ConfigError(
                "memory.limits is 'reserved', but this is the CPU, where nothing is reserved beside tensors; leave it "
                "out.",
                key="memory.limits",
            )
        budget_bytes = self._wanted_bytes(device_total_bytes, available_bytes)
        if budget_bytes is not None and device_total_bytes is not None:
            _refuse_more(budget_bytes, device_total_bytes, available_bytes)
        return budget_bytes

    def _wanted_bytes(self, total_bytes: int | None, available_bytes: int | None) -> int | None:
        if isinstance(self.budget, float):
            return self._fraction_bytes(self.budget, total_bytes)
        if self.budget != "auto":
            return int(self.budget)
        if total_bytes is None:
            return None
        available_bytes = total_bytes if available_bytes is None else available_bytes
        return available_bytes - self._reserve_bytes(total_bytes, available_bytes)

    def _fraction_bytes(self, fraction: float, device_total_bytes: int | None) -> int:
        if device_total_bytes is None:
            raise ConfigError(
                f"memory.budget is {fraction}, a fraction of the device's memory, but this is the CPU, which shares "
                "its memory with everything else; write bytes, such as '4GiB', or 'auto' for no limit.",
                key="memory.budget",
            )
        return int(fraction * device_total_bytes)

    def _reserve_bytes(self, total_bytes: int, available_bytes: int) -> int:
        fraction = isinstance(self.reserve, float)
        reserve = int(self.reserve * total_bytes) if fraction else int(self.reserve)
        if reserve >= available_bytes:
            raise ConfigError(
                f"memory.reserve is {self.reserve}, which leaves nothing of the device's {total_bytes:,} bytes"
                f"{_held(total_bytes, available_bytes)}; write less.",
                key="memory.reserve",
            )
        return reserve


def _refuse_more(budget_bytes: int, total_bytes: int, available_bytes: int | None) -> None:
    left_bytes = total_bytes if available_bytes is None else available_bytes
    if budget_bytes > left_bytes:
        raise ConfigError(
            f"memory.budget is {budget_bytes:,} bytes, but the device has {total_bytes:,}"
            f"{_held(total_bytes, left_bytes)}; write less, or 'auto'.",
            key="memory.budget",
        )


def _held(total_bytes: int, available_bytes: int) -> str:
    """Say what others hold of a device; nothing if they hold nothing."""
    held_bytes = total_bytes - available_bytes
    return f", of which other programs and CUDA hold {held_bytes:,}" if held_bytes else ""


def _refuse_without_effect(memory: MemoryConfig) -> None:
    """Refuse settings that have no effect beside the others."""
    is_planned = memory.policy == "plan"
    beside = f"policy is {memory.policy!r}" if not is_planned else "budget is given"
    unused = {
        "budget": not is_planned,
        "reserve": not is_planned or memory.budget != "auto",
        "limits": not is_planned,
        "keep": memory.policy == "keep_all",
        "recompute": memory.policy == "recompute_all",
        "compress": not is_planned,
        "offload": not is_planned and memory.offloads_activations,
    }
    if memory.offload == "none" and not memory.offload_weights:
        _refuse_unused(memory, "host_budget", "memory", "where memory.offload is 'none'; set both.")
    for name, is_unused in unused.items():
        if is_unused:
            _refuse_unused(memory, name, "memory", f"where memory.{beside}; leave one of them out.")


def _refuse_unused(section: Section, name: str, where: str, reason: str) -> None:
    """Refuse a value other than the default in a field that has no effect."""
    (default,) = (each.default for each in dataclasses.fields(section) if each.name == name)  # type: ignore[arg-type]
    value = getattr(section, name)
    if value != default:
        raise ConfigError(
            f"{where}.{name} is {value!r}, and has no effect {reason}", key=f"{where}.{name}"
        )


# Keys of fp8 that only the recipe `delayed` uses.
_OF_DELAYED = ("amax_history_len", "amax_compute_algo", "margin", "reduce_amax")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config(Section):
    """Linear layers in 8-bit floating point; `{}` takes the defaults."""

    backend: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Kernels: TransformerEngine's, which the extra `te` installs, or PyTorch's own; `auto` takes
    TransformerEngine's where it is installed and there is a CUDA device."""

    recipe: Literal["delayed", "current", "block", "mxfp8", "nvfp4"] = "delayed"
    """Scaling into the range of fp8: `delayed` by each tensor's magnitudes in earlier steps,
    `current` by its own, `block` by those of each 1x128 (weights: 128x128) block of elements,
    `mxfp8` by those of each 32 elements along the dim that a product sums over, and `nvfp4` by those
    of each 16 (weights: 16x16), with numbers of 4 bits, of models in bfloat16 alone. On CUDA, the last
    two need a Blackwell GPU and TransformerEngine."""

    fp8_format: Literal["HYBRID", "E4M3"] | None = None
    """`E4M3` for all tensors, or `HYBRID`: gradients are E5M2, with more range and less precision;
    null is `HYBRID` for the recipes `delayed` and `current`, `E4M3` for the others."""

    amax_history_len: Positive = 1024
    """Steps that the recipe `delayed` looks back."""

    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Magnitude that `delayed` takes from those steps: the largest one, or that of the last step."""

    margin: Whole = 0
    """`delayed` scales 2**margin lower than would just fit, for tensors that grow quickly."""

    reduce_amax: bool = True
    """`delayed` uses the largest magnitude on all ranks, so that all scale alike; false is for one
    rank, and refused with more."""

    skip_modules: tuple[str, ...] = ("lm_head",)
    """Names of modules, or patterns such as `*.gate`, whose linear layers do not run in fp8: the
    whole name or its end."""

    frozen_weights: Literal["compute", "fp8"] = "compute"
    """Storage of frozen weights of linear layers that run in fp8: `compute` keeps them in their dtype,
    and a copy in fp8 to compute with; `fp8` keeps the fp8 numbers alone, half the bytes of bfloat16,
    also where ranks gather them."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.recipe != "delayed":
            for name in _OF_DELAYED:
                _refuse_unused(
                    self,
                    name,
                    "fp8",
                    f"with fp8.recipe {self.recipe!r}, which keeps no history of magnitudes; leave it out, or set "
                    "the recipe to 'delayed'.",
                )
        if self.recipe in ("mxfp8", "nvfp4") and self.frozen_weights == "fp8":
            raise ConfigError(
                f"fp8.frozen_weights is 'fp8' and fp8.recipe is {self.recipe!r}, whose backward casts the weight "
                "itself, along its other dim; leave frozen_weights out, or set the recipe to 'delayed', 'current' "
                "or 'block'.",
                key="fp8.frozen_weights",
            )
        if self.recipe == "nvfp4" and self.fp8_format == "HYBRID":
            raise ConfigError(
                "fp8.fp8_format is 'HYBRID' and fp8.recipe is 'nvfp4', of which all numbers are E2M1; leave it out.",
                key="fp8.fp8_format",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySection(CompileConfig):
    """Sharding, capture and compilation, and what is the same for all modules."""

    sharding: ShardingConfig = field(default_factory=ShardingConfig)

    prefetch: Literal["auto"] | Bytes = "auto"
    """Bytes of gathered weights in flight ahead of their use, and (half of it) of gradients whose
    reduction is in flight, as far as `memory.budget` has room; `auto` is twice the model's largest
    block, 0 overlaps nothing."""

    accumulate: Literal["auto", "reduce_every", "accumulate_unsharded"] = "auto"
    """Gradients of a backward inside `fabric.no_backward_sync`: `reduce_every` reduces them at once
    and keeps shards, `accumulate_unsharded` keeps unreduced gradients in float32 and leaves the
    reduction to the first backward outside; `auto` is `accumulate_unsharded` if unreduced
    gradients take at most a tenth of `memory.budget`, else, and without a budget, `reduce_every`."""

    bucket: Literal["auto"] | Bytes = "auto"
    """Largest size of a parameter that shares collectives with its neighbours; 0 gives each
    parameter collectives of its own."""

    reduce_dtype: Literal["float32"] | None = "float32"
    """Dtype in which gradients of fewer bits are summed over the ranks; None sums them as they are."""

    nonfinite_gradients: Literal["ignore", "skip", "stop"] = "ignore"
    """Handling of a step whose gradients are infinite or not a number on any rank: `ignore` takes it;
    `skip` leaves parameters and optimizer state alone on every rank, and logs a warning; `stop`
    raises an error on every rank. Under `skip`, clipping to a norm raises nothing either."""

    timeout: timedelta = timedelta(minutes=30)
    """Longest wait of a collective for the other ranks; users write `30min`. After it, a collective
    on gloo fails with a message; on nccl torch's watchdog logs one, and ends the process."""

    state_dict_type: Literal["sharded", "full"] = "sharded"
    """Format that `fabric.save` writes: one directory of shards, or one file with full tensors."""


def _refuse_with_updates(config: StrategyConfig) -> None:
    """Refuse what wants all gradients of a step before its update."""
    wanted = {
        "nonfinite_gradients": (config.nonfinite_gradients, "ignore"),
        "cuda_graphs": (config.cuda_graphs, False),
    }
    for name, (value, other) in wanted.items():
        if value not in (other, "auto"):
            raise ConfigError(
                f"memory.optimizer_in_backward is true and strategy.{name} {value!r}, but a weight is updated before "
                f"the other gradients are there; set strategy.{name} to {other!r}, or leave optimizer_in_backward out.",
                key=f"strategy.{name}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig(StrategySection):
    """The settings of `ThunderMemsaveStrategy`."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    fp8: Fp8Config | None = None
    frozen_weights: FrozenFormat | None = None
    """Format of frozen weights of linear layers, in `mxfp4` of experts too; in a run file, `model.frozen_weights`."""

    def __post_init__(self) -> None:
        StrategySection.__post_init__(self)
        if self.frozen_weights is not None and self.fp8 is not None:
            raise ConfigError(
                f"frozen_weights is {self.frozen_weights!r}, and fp8 is set too, but its linears multiply 8-bit "
                "numbers of their weights: leave out fp8, or write fp8.frozen_weights: fp8 in place of it.",
                key="model.frozen_weights",
            )
        if self.memory.optimizer_in_backward is True:
            _refuse_with_updates(self)

    @property
    def casts_frozen_weights(self) -> bool:
        """Whether frozen weights are kept in a format of fewer bytes alone."""
        in_fp8 = self.fp8 is not None and self.fp8.frozen_weights == "fp8"
        return in_fp8 or self.frozen_weights is not None

    @property
    def may_stream_weights(self) -> bool:
        """Whether a plan may keep frozen weights on the host: not those of which fp8 has numbers on the device too."""
        return self.memory.may_offload and (self.fp8 is None or self.fp8.frozen_weights == "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySections(Section):
    """The sections of a run file that are the strategy's; the others belong to the fine-tuning command."""

    strategy: StrategySection = field(default_factory=StrategySection)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    fp8: Fp8Config | None = None
    """`{}` takes the defaults; None runs nothing in fp8."""

    @property
    def together(self) -> StrategyConfig:
        """All settings of the strategy but `frozen_weights`, which is in another section."""
        own = dataclasses.asdict(self.strategy)
        return StrategyConfig(**own, memory=self.memory, fp8=self.fp8)


def load_strategy_config(path: str | Path) -> StrategyConfig:
    """Read the sections `strategy`, `memory` and `fp8` of a run's YAML file, and `model.frozen_weights`.

    Raises:
        ConfigError: the file cannot be read, or one of these is wrong.
    """
    given, ours = load_yaml(path), field_names(StrategySections)
    for name in given:
        # Other names are for the command to judge, but a misspelled section would silently train with the defaults.
        if name not in ours and difflib.get_close_matches(name, ours, n=1, cutoff=0.75):
            raise ConfigError(f"{path} has no section {name!r}{suggestion(name, ours)}")
    sections = {name: given[name] for name in ours if given.get(name) is not None}
    parsed = parse_section(StrategySections, sections, where="").together
    kept = m.get("frozen_weights") if isinstance(m := given.get("model"), dict) else None
    if kept not in (None, *get_args(FrozenFormat)):
        known, key = " or ".join(map(repr, get_args(FrozenFormat))), "model.frozen_weights"
        raise ConfigError(f"{key} is {kept!r}; write {known}, or null.", key=key)
    return dataclasses.replace(parsed, frozen_weights=kept)
