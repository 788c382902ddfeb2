"""The run file as frozen dataclasses: each key with its meaning and its default."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from thunder_memsave.config import (
    Fp8Config,
    MemoryConfig,
    StrategyConfig,
    StrategySection,
    StrategySections,
)
from thunder_memsave.settings.frozen_format import FrozenFormat
from thunder_memsave.settings.schema import Section
from thunder_memsave.settings.value_kinds import Must, Positive, Whole, at_least

# Lists of more rows would exhaust memory.
_AT_MOST = Must(f"be at most {2**31 - 1}", lambda value: value < 2**31)
_Count = Annotated[Positive, _AT_MOST]

_ABOVE_0 = Must("be above 0 and finite", lambda value: 0 < value < float("inf"))

_NO_LIMIT = "; leave it out, or write null, for no limit"


class ClassSpec(TypedDict):
    """A class named in YAML, with the arguments for its constructor."""

    class_path: Annotated[str, "the name of a class"]
    init_args: NotRequired[dict[str, Any]]


class OptimizerSpec(ClassSpec):
    """An optimizer, and the formats of what it keeps and changes."""

    states: NotRequired[Literal["float32", "bfloat16", "int8", "fp8"]]
    rounding: NotRequired[Literal["nearest", "stochastic"]]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model to train, and its number formats."""

    name_or_path: str = ""
    """A directory, a name on the Hugging Face hub, or an address of fsspec, such as `s3://bucket/models/first`, with
    the tokenizer and, unless `config` is given, the model's config and safetensors weights."""

    revision: str | None = None
    """Branch, tag or commit on the hub; null means its main branch. Not for a directory."""

    config: dict[str, Any] | None = None
    """A transformers config (`model_type: llama`, ...): random weights instead of loaded ones."""

    architecture: dict[str, Any] | None = None
    """The shape in the model's own config (`model_type: llama`, ...), so that `plan` needs
    no hub. It is used for nothing else; a model of another shape is refused."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the frozen weights and of the computation."""

    trainable_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the trained weights; small updates vanish in bfloat16, unless `optimizer.rounding` is
    `stochastic`."""

    frozen_weights: FrozenFormat | None = None
    """Format in which frozen weights of linear layers, except `lm_head`, are kept: `nf4` is 4 bits with double
    quantisation, as in QLoRA, `int8` is 8 bits with a scale for each row, and `mxfp4`, which keeps those of experts
    too, is 4 bits with a power of two for each 32 elements, as in gpt-oss; null keeps them in `dtype`. For 8-bit
    floating point see `fp8.frozen_weights`."""

    attn_implementation: Literal["auto", "sdpa", "eager"] = "auto"
    """Implementation of attention in transformers; `auto` is `sdpa` where it has that for the model, else `eager`,
    whose scores are as long as the sequence squared."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The training data, and how documents become rows of a fixed length."""

    dataset: ClassSpec = field(default_factory=lambda: ClassSpec(class_path=""))
    """`DataFiles`, `TextJSONL`, `PromptJSONL`, `ChatJSONL` or `PlainText` (or the import path of a class
    with their interface) and its arguments."""

    max_seq_length: Annotated[int, at_least(2, ": a token and the one that it predicts")] = 2048
    """Tokens per row; every row has this length, so that one captured graph serves all."""

    packing: bool = True
    """Put several documents into one row, kept apart by their boundaries and positions; without it each
    document has its own padded row."""

    max_documents_per_row: _Count | None = None
    """Documents in one packed row at most; null: as many as the fullest row of the data has. Attention on CUDA takes a
    little longer for each document for which rows have room."""

    train_on: Literal["auto", "assistant", "all"] = "auto"
    """Tokens with a loss: `assistant` for completions and assistant messages, or `all`; `auto` means
    `assistant` for data that marks such parts."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(Section):
    """Preference tuning, in place of learning to write all of what the data has."""

    loss: Literal["dpo", "orpo", "kto"] = "dpo"
    """`dpo` and `orpo` take pairs of a chosen and a rejected text, `kto` texts with a `label` (or pairs, each of which
    is two of them). `dpo` and `kto` compare with the model as it is at the start of the run."""

    beta: Annotated[float, _ABOVE_0] = 0.1
    """Of `dpo` and `kto`: how far the model is held near the reference; of `orpo`: weight of the odds ratio."""

    desirable_weight: Annotated[float, _ABOVE_0] = 1.0
    """Weight of desirable texts in `kto`; with it, the number of desirable texts times their weight should be about
    that of the others."""

    undesirable_weight: Annotated[float, _ABOVE_0] = 1.0
    """Weight of the other texts in `kto`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Batch sizes, length and seed of the run."""

    global_batch_size: _Count | None = None
    """Rows per optimizer step, over all ranks and micro-batches: `micro_batch_size` times
    `gradient_accumulation_steps` times the number of processes. Give any two of the three; 16 when
    neither this nor `gradient_accumulation_steps` is given."""

    micro_batch_size: _Count | None = None
    """Rows per forward pass on one rank; 1 unless the other two are given."""

    gradient_accumulation_steps: _Count | None = None
    """Forward and backward passes per optimizer step on each rank."""

    epochs: Annotated[int, at_least(1, _NO_LIMIT), _AT_MOST] | None = None
    """Passes over the data; one when neither this nor `max_steps` is given. With both, the run
    ends at whichever comes first."""

    max_steps: Annotated[int, at_least(1, _NO_LIMIT), _AT_MOST] | None = None
    """Optimizer steps."""

    max_grad_norm: (
        Annotated[float, Must("be above 0; write null for no clipping", lambda value: value > 0)]
        | None
    ) = 1.0
    """Norm to which the gradients of a step are clipped; null for no clipping. Either way,
    `guards.nonfinite` handles a norm that is not finite."""

    log_every_n_steps: _Count = 1
    """Steps between two log lines. Between them no step waits for the device, unless `guards.nonfinite` is not
    `stop`, `guards.loss_spike` is set, or the optimizer has no fused kernel. `metrics.csv` has every step all the
    same; a bad step is found at the next line, and no weight has changed since."""

    seed: Annotated[int, Must("be from 0 to 4294967295", lambda value: 0 <= value < 2**32)] = 42
    """Seed of initial values, of the order of the data and of dropout."""

    deterministic: bool = False
    """Use kernels that add up in a fixed order, so that two runs on CUDA have the same bits. They are
    slower, and an operation that has none is an error. On the CPU two runs are alike anyway."""


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig(Section):
    """The learning rate from step to step."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warmup."""

    warmup_steps: Annotated[
        int | float,
        Must("not be negative", lambda value: 0 <= value < float("inf")),
        Must(
            "be a whole number of steps or a fraction of the run below 1",
            lambda value: value <= 1 or value == int(value),
        ),
    ] = 0.03
    """Steps of linear warmup; below 1 it is a fraction of the run."""

    min_lr_ratio: Annotated[float, Must("be from 0 to 1", lambda value: 0 <= value <= 1)] | None = (
        None
    )
    """Final learning rate as a fraction of the optimizer's; null is 0.1. Not for `constant`."""


@dataclass(frozen=True, kw_only=True)
class GuardsConfig(Section):
    """The handling of a step with a bad loss or bad gradients. All ranks decide alike.

    No weight is updated, unless `memory.optimizer_in_backward` has done so before.
    """

    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """For a loss or a gradient that is infinite or NaN on any rank: `stop` ends the run, `skip` leaves
    the step out, `rollback` goes back to the last checkpoint and skips the data since."""

    loss_spike: Literal["stop", "skip", "rollback"] | None = None
    """The same for a loss far above the recent ones; null turns this off. A spike is above
    m + `spike_threshold` * d: m is the median of the last `spike_window` losses, d the median of their distances
    from m, and at least 1 % of m."""

    spike_window: _Count = 50
    """Steps whose losses are compared; until there are as many, no loss is a spike."""

    spike_threshold: Annotated[
        float,
        Must(
            "be above 0 and finite; for no limit, guards.loss_spike: null",
            lambda value: 0 < value < float("inf"),
        ),
    ] = 10.0
    """Factor of d above m from which a loss is a spike."""

    max_skips: Annotated[int, at_least(0, "; 0 ends the run at the first bad step")] = 5
    """Consecutive steps left out, or rollbacks to the same checkpoint; the next bad step ends the run."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """When the validation loss is computed, besides at the start and at the end."""

    every_n_steps: (
        Annotated[int, at_least(1, "; write null for the start and the end only"), _AT_MOST] | None
    ) = 200
    """Optimizer steps between evaluations; null for the start and the end only."""

    max_batches: (
        Annotated[int, at_least(1, "; write null for the whole validation set"), _AT_MOST] | None
    ) = 50
    """Micro-batches per rank and evaluation; null for the whole validation set."""

    answers: Annotated[int, at_least(0), _AT_MOST] = 0
    """Prompts of the validation set that the model answers at each evaluation, greedily, for `answers.jsonl` in
    `output_dir`; the first is shown. Each token takes a forward of one row."""

    max_new_tokens: Annotated[int, at_least(1), _AT_MOST] = 64
    """Most tokens of such an answer."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When the state of the run is saved, besides at the end."""

    every_n_steps: Annotated[int, at_least(1, "; write null for the end only"), _AT_MOST] | None = (
        500
    )
    """Optimizer steps between checkpoints; null for the end only."""

    keep_last: _Count = 2
    """Newest checkpoints to keep; older ones are deleted."""

    keep_best: Whole = 0
    """Checkpoints to keep besides, those with the smallest `best_of`. A checkpoint has the value of the
    evaluation at its own step, so `every_n_steps` must be a multiple of `eval.every_n_steps`."""

    best_of: str = "val_loss"
    """The metric that `keep_best` compares: `val_loss`, or one that a callback adds to evaluations. If larger
    is better, use `ModelCheckpoint` under `callbacks` with `best_mode: max`."""

    asynchronous: bool = False
    """Copy the state to host memory, and write it while training goes on; the next save and the end of the run
    wait for it. A rank's copy is as large as its part of a checkpoint."""

    copy_to: str | None = None
    """An address of fsspec, such as `s3://bucket/runs/first`, to which checkpoints and what was trained are copied once
    they are whole in `output_dir`; `resume: auto` looks there too. One run for each address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMemoryConfig(MemoryConfig):
    """The strategy's settings of memory, of a command that knows what its steps do."""

    optimizer_in_backward: Literal["auto"] | bool = "auto"
    """Update each parameter in backward, as soon as its gradient is there, so that the gradients of all are never there
    at once. With the bits of `optimizer.step()`, which then has nothing left to do. For steps of one micro-batch
    whose gradients are not clipped (`train.max_grad_norm: null`), and models that are one graph. `auto` does so in
    such runs where no plan fits otherwise; in a script it is off unless it is set."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """A whole run of `thunder-memsave train`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: dict[str, Any] | None = None
    """Fields of `peft.LoraConfig` under their own names; null, with `adapter` null too, trains every
    weight."""

    adapter: ClassSpec | None = None
    """Another adapter of peft: its config class, such as `IA3Config`, and the class's fields."""

    data: DataConfig = field(default_factory=DataConfig)
    preference: PreferenceConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerSpec = field(
        default_factory=lambda: OptimizerSpec(
            class_path="torch.optim.AdamW", init_args={"lr": 2e-4, "weight_decay": 0.0}
        )
    )
    """A torch optimizer and its arguments. For `AdamW`, `Adam` and `SGD` also `states`, the format of moments:
    `float32`, `bfloat16`, `int8` or `fp8`, by default that of trained weights; and `rounding: stochastic` for trained
    weights in bfloat16, which keeps small updates on average."""

    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    strategy: StrategySection = field(default_factory=StrategySection)
    memory: RunMemoryConfig = field(default_factory=RunMemoryConfig)
    fp8: Fp8Config | None = None
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loggers: list[ClassSpec] = field(default_factory=list)
    """Lightning loggers besides `metrics.csv`, such as `TensorBoardLogger`, and their arguments."""

    callbacks: list[ClassSpec] = field(default_factory=list)
    """Callbacks besides the ones that every run has; one of these classes replaces that one."""

    devices: (
        Annotated[int, at_least(1, "; write 'auto' for all GPUs"), _AT_MOST] | Literal["auto"]
    ) = "auto"
    """Processes on this machine, one per device: `auto` is what torchrun started, else all GPUs, else
    one process. Another number than torchrun's is refused."""

    output_dir: str = ""
    """The directory of the run; must not hold another run unless `resume` continues it."""

    resume: bool | str = False
    """`false`, `auto` (the newest checkpoint in `output_dir` or at `checkpoint.copy_to`, if any), a checkpoint's path,
    or the address of one or of a run."""

    @property
    def _may_update_in_backward(self) -> bool:
        """Whether nothing, but several micro-batches, wants all gradients of a step before its update."""
        guards, strategy = self.guards, self.strategy
        skips = "skip" in (guards.nonfinite, guards.loss_spike)
        waits = strategy.nonfinite_gradients != "ignore" or strategy.cuda_graphs is True
        is_planned = self.memory.policy == "plan"
        return is_planned and self.train.max_grad_norm is None and not (skips or waits)

    @property
    def of_strategy(self) -> StrategyConfig:
        """The strategy's settings: three sections, and `model.frozen_weights`.

        Raises:
            ConfigError: Two of them do not go together.
        """
        memory = self.memory
        if memory.optimizer_in_backward == "auto" and not self._may_update_in_backward:
            memory = replace(memory, optimizer_in_backward=False)
        sections = StrategySections(strategy=self.strategy, memory=memory, fp8=self.fp8)
        return replace(sections.together, frozen_weights=self.model.frozen_weights)
