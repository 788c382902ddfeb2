"""Adds an adapter of peft to a model whose weights are still on the meta device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor, nn

from thunder_memsave.finetune.model.hub import is_hub_name
from thunder_memsave.finetune.model.task import CAUSAL_LM
from thunder_memsave.finetune.run_file.classes.class_spec import (
    argument_problems,
    checked_init_args,
    import_class,
    unquoted_arguments,
)
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.materialize.pending_weights import load_on_setup
from thunder_memsave.settings.problems import ConfigError, raise_all, suggestion

# A step of each was compared with eager peft, and its initial weights with peft's on a loaded model.
_METHODS = (
    "LoraConfig",
    "C3AConfig",
    "GraloraConfig",
    "IA3Config",
    "MissConfig",
    "RoadConfig",
    "VeraConfig",
)
_VALUES_DECIDE = "its layers choose their way by the value of a tensor, which no captured graph can"
_CONSTANTS = "its layers make constants in every forward pass that Thunder does not compile"
_MORE_TOKENS = "it adds positions to every row, which the fixed rows and their loss do not have"
_BASE_VALUES = "it starts from the base weights, which are read after the adapter is made"
_REASONS = {
    "AdaLoraConfig": "it changes its ranks during training, and its layers cannot be compiled",
    "AdaptionPromptConfig": _MORE_TOKENS,
    "BOFTConfig": _CONSTANTS,
    "CPTConfig": _MORE_TOKENS,
    "DeloraConfig": _BASE_VALUES,
    "HRAConfig": _CONSTANTS,
    "HiraConfig": "its layers cannot be compiled",
    "LNTuningConfig": _BASE_VALUES,
    "LoHaConfig": _VALUES_DECIDE,
    "LoKrConfig": _VALUES_DECIDE,
    "MultitaskPromptTuningConfig": _MORE_TOKENS,
    "OFTConfig": _CONSTANTS,
    "OSFConfig": _BASE_VALUES,
    "PolyConfig": "it needs a task number with every row, which the data formats do not have",
    "PrefixTuningConfig": _MORE_TOKENS,
    "PromptEncoderConfig": _MORE_TOKENS,
    "PromptTuningConfig": _MORE_TOKENS,
    "RandLoraConfig": "its layers cannot be compiled under bfloat16",
    "ShiraConfig": "its layers use sparse tensors, which cannot be captured",
    "TrainableTokensConfig": "its embedding cannot be compiled; use modules_to_save in 'lora'",
    "VBLoRAConfig": _VALUES_DECIDE,
    "XLoraConfig": "it mixes adapters that are trained already",
}

_NOT_TRIED = "no run with it was compared with eager peft"
_LORA_FIELDS = {
    "alora_invocation_tokens": _NOT_TRIED,
    "arrow_config": _NOT_TRIED,
    "corda_config": _BASE_VALUES,
    "eva_config": _BASE_VALUES,
    "kasa_config": _NOT_TRIED,
    "layer_replication": "the layers that it adds are not in the model's files",
    "loftq_config": _BASE_VALUES,
    "lora_ga_config": _BASE_VALUES,
    "megatron_config": "the model is not Megatron's",
    "monteclora_config": _NOT_TRIED,
    "target_parameters": "peft changes parameters by hooks, which cannot be captured",
    "trainable_token_indices": "its embedding cannot be compiled; use modules_to_save",
    "use_bdlora": _NOT_TRIED,
    "use_qalora": _NOT_TRIED,
    "velora_config": _NOT_TRIED,
}
_LORA_STARTS = (True, "gaussian")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSection:
    """The section of the run file that asks for an adapter."""

    where: str
    """The section's name in messages and keys: `lora` or `adapter.init_args`."""

    method: type[peft.PeftConfig]
    values: Mapping[str, Any]

    def error(self, message: str, field: str | None = None) -> ConfigError:
        """Make an error about a field, or about the section."""
        key = self.where if field is None else f"{self.where}.{field}"
        return ConfigError(message, key=key)


def has_adapter(config: RunConfig) -> bool:
    """Tell whether the run trains an adapter, and not the model itself."""
    return config.lora is not None or config.adapter is not None


def check_adapter(config: RunConfig) -> AdapterSection | None:
    """Find the adapter's section, and check it as far as possible without the model.

    Raises:
        ConfigError: the method, or a field of it, is unknown or cannot be trained here.
    """
    section = _section(config)
    if section is None:
        return None
    _check_common_fields(section)
    if section.method is peft.LoraConfig:
        raise_all(list(_lora_problems(section)))
    return section


def add_adapter(model: Any, section: AdapterSection, config: RunConfig) -> nn.Module:
    """Wrap the model, whose weights stay on the meta device.

    LoRA's weights are on it too, and are initialised when the model is set up. Those of the other
    methods are made here on the CPU, from the run's seed, and moved to it when the model is set up.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    _check_targets(model, section)
    # peft writes the base model's name into adapter_config.json.
    revision = config.model.revision if is_hub_name(config.model) else None
    values = {"task_type": CAUSAL_LM.peft_type, "revision": revision, **section.values}
    keep_dtype = config.model.trainable_dtype == config.model.dtype
    on_meta = section.method is peft.LoraConfig
    try:
        with warnings.catch_warnings(), _start_of_weights(model, config, on_meta=on_meta):
            # peft asks transformers for an attribute that transformers is renaming.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            wrapped = peft.get_peft_model(
                model,
                section.method(**values),
                autocast_adapter_dtype=not keep_dtype,
                low_cpu_mem_usage=on_meta,  # its name for the meta device
            )
    # peft raises these for values that it did not expect.
    except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
        raise section.error(f"peft refuses the section {section.where!r}: {error}") from error
    _check_layers(wrapped, section)
    _load_own_weights_on_setup(wrapped)
    return wrapped


def names_before(model: nn.Module, stored: Mapping[str, str]) -> Callable[[str], str | None]:
    """Remember the model's names, and return a function that finds them under an adapter.

    For `load_on_setup`: the adapter's own names give None. Of tied weights the files
    have one; a copy that `modules_to_save` makes of another is filled from that one too.

    Args:
        model: The model without an adapter.
        stored: Name in the model -> name in the files.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    twins = {id(tensor): stored[name] for name, tensor in tensors.items() if name in stored}
    known = {
        name: stored.get(name, twins.get(id(tensor), name)) for name, tensor in tensors.items()
    }
    added = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")

    def rename(name: str) -> str | None:
        plain = added.sub("", name.removeprefix("base_model.model."))
        return known.get(plain)

    return rename


def _section(config: RunConfig) -> AdapterSection | None:
    if config.adapter is None:
        if config.lora is None:
            return None
        problems = argument_problems(peft.LoraConfig, config.lora, where="lora")
        raise_all(list(problems))
        return AdapterSection(
            where="lora",
            method=peft.LoraConfig,
            values=unquoted_arguments(peft.LoraConfig, config.lora),
        )
    if config.lora is not None:
        raise ConfigError("adapter and lora are both given; give one of them.", key="adapter")
    method = import_class(config.adapter, where="adapter", default_module="peft")
    _check_method(method, str(config.adapter["class_path"]))
    values = checked_init_args(method, config.adapter, where="adapter")
    where = "lora" if method is peft.LoraConfig and not values else "adapter.init_args"
    return AdapterSection(where=where, method=method, values=values)


def _check_method(method: type, path: str) -> None:
    key = "adapter.class_path"
    if not issubclass(method, peft.PeftConfig):
        raise ConfigError(
            f"{key} is {path!r}, which is not a config class of peft; name one of "
            f"{', '.join(_METHODS)}.",
            key=key,
        )
    if method.__name__ not in _METHODS:
        raise ConfigError(
            f"{key} is {path!r}, which cannot be trained here: "
            f"{_REASONS.get(method.__name__, _NOT_TRIED)}. Use one of {', '.join(_METHODS)}.",
            key=key,
        )


def _check_common_fields(section: AdapterSection) -> None:
    task = section.values.get("task_type", CAUSAL_LM.peft_type)
    if task != CAUSAL_LM.peft_type:
        raise section.error(
            f"{section.where}.task_type is {task!r}, but the models here are causal language "
            "models; leave it out.",
            "task_type",
        )
    if section.values.get("inference_mode"):
        raise section.error(
            f"{section.where}.inference_mode is true, so nothing would be trained; leave it out.",
            "inference_mode",
        )


def _lora_problems(section: AdapterSection) -> Iterator[ConfigError]:
    values = section.values
    for name, reason in _LORA_FIELDS.items():
        if values.get(name):
            yield section.error(
                f"{section.where}.{name} is {values[name]!r}, which cannot be trained here: "
                f"{reason}; leave it out.",
                name,
            )
    start = values.get("init_lora_weights", True)
    if start not in _LORA_STARTS:
        yield section.error(
            f"{section.where}.init_lora_weights is {start!r}, but must be true or 'gaussian' here: "
            "the others start from the base weights, which are read after the adapter is made, or "
            "change what the model computes.",
            "init_lora_weights",
        )
    for name in ("r", "lora_alpha"):
        if values.get(name, 1) <= 0:
            yield section.error(
                f"{section.where}.{name} is {values[name]!r}, but must be positive.", name
            )
    dropout = values.get("lora_dropout", 0.0)
    if not 0 <= dropout < 1:
        yield section.error(
            f"{section.where}.lora_dropout is {dropout!r}, but must be at least 0 and below 1.",
            "lora_dropout",
        )


def _check_targets(model: nn.Module, section: AdapterSection) -> None:
    """Refuse names that no module has; peft itself is content if one of them exists."""
    paths = [name for name, _ in model.named_modules() if name]
    for field in ("target_modules", "modules_to_save", "feedforward_modules"):
        for name in _names_in(section.values.get(field)):
            if not any(path == name or path.endswith(f".{name}") for path in paths):
                leaves = {path.rpartition(".")[2] for path in paths}
                raise section.error(
                    f"{section.where}.{field} has {name!r}, but the model has no module of that "
                    f"name{suggestion(name, sorted(leaves - {'', *map(str, range(999))}))}",
                    field,
                )
    num_layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    layers = section.values.get("layers_to_transform")
    for layer in [layers] if isinstance(layers, int) else layers or ():
        if num_layers is not None and not 0 <= layer < num_layers:
            raise section.error(
                f"{section.where}.layers_to_transform has {layer}, but the model's layers are 0 "
                f"to {num_layers - 1}.",
                "layers_to_transform",
            )


def _names_in(value: object) -> list[str]:
    # A string is `all-linear`, or a pattern that peft matches.
    return [str(name) for name in value] if isinstance(value, list | tuple | set) else []


@contextmanager
def _start_of_weights(model: nn.Module, config: RunConfig, *, on_meta: bool) -> Iterator[None]:
    """Let peft make an adapter's weights on the CPU, although the model's are on meta.

    peft puts them on the device of the layer's own weight. Meanwhile, that weight is one zero,
    expanded to its shape, which takes no memory. None of the accepted adapters reads its value.
    """
    if on_meta:
        yield
        return
    kept = [(owner, dict(owner._parameters)) for owner in model.modules()]
    for owner, parameters in kept:
        for name, parameter in parameters.items():
            if parameter is not None:
                owner._parameters[name] = _expanded_zero(parameter)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.train.seed)
        yield
    for owner, parameters in kept:
        for name, parameter in parameters.items():
            if parameter is not None:
                # peft has frozen the temporary one.
                parameter.requires_grad_(owner._parameters[name].requires_grad)  # type: ignore[union-attr]
        owner._parameters.update(parameters)
    _copies_to_meta(model)


def _expanded_zero(parameter: Tensor) -> nn.Parameter:
    zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return nn.Parameter(zero, requires_grad=parameter.requires_grad)


def _copies_to_meta(model: nn.Module) -> None:
    """Put copies that peft made of a model's own modules (`modules_to_save`) back on meta."""
    for name, module in model.named_modules():
        if "modules_to_save." in name:
            module.to_empty(device="meta", recurse=False)


def _load_own_weights_on_setup(wrapped: nn.Module) -> None:
    """Store the adapter's initial weights, so that the whole model is on meta until its setup."""
    made = {name: p.detach() for name, p in wrapped.named_parameters() if not p.is_meta}
    if not made:
        return
    for module in wrapped.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                on_meta = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                module._parameters[name] = parameter if parameter.is_meta else on_meta
    load_on_setup(wrapped, made, rename=lambda name: name if name in made else None)


def _check_layers(wrapped: nn.Module, section: AdapterSection) -> None:
    for name, module in wrapped.named_modules():
        if isinstance(module, peft.tuners.lora.Embedding):
            raise section.error(
                f"{section.where}.target_modules includes the embedding {name!r}, whose adapter "
                "cannot be compiled; train it whole by modules_to_save, or leave it out.",
                "target_modules",
            )
    if not any(parameter.requires_grad for parameter in wrapped.parameters()):
        raise section.error(
            f"the section {section.where!r} leaves nothing to train; look at its target_modules."
        )
