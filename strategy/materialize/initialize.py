"""Computes initial values for parameters and buffers on meta, by the modules' own rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thunder_memsave.materialize.magnitudes import magnitudes_of, start_later
from thunder_memsave.sharding.rows import whole_shape

Initialised = tuple[str, Tensor, Tensor]
_PLAIN = (bool, int, float, str, tuple, list, type(None))


def initialize(module: nn.Module, *, seed: int) -> Iterator[Initialised]:
    """Yield (name, meta tensor, its whole initial value on the CPU); the caller fills the tensor before the next.

    One seed gives the same values on all ranks; the global generators are left as they were.

    Raises:
        ValueError: A tensor has no initial value; the message names it.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # The CPU generator only: `torch.manual_seed` would give all ranks the same CUDA seed, for good.
        torch.default_generator.manual_seed(seed)
        for unit in _units(module, "", ()):
            yield from _initialize_unit(unit)
    _refuse_rest(module)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """A part of the module that is allocated whole on the CPU, initialised, and copied from."""

    name: str
    module: nn.Module
    ancestors: tuple[nn.Module, ...]
    recurse: bool
    """Whether its submodules belong to it, or only the tensors that it owns itself."""

    def full_name(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


def _units(module: nn.Module, name: str, ancestors: tuple[nn.Module, ...]) -> Iterator[_Unit]:
    """Yield the largest parts with a rule whose parameters are all on meta, then single owners of meta tensors.

    A model's own rule may look beyond one layer, as GPT-2's does for residual projections; but
    if some weights came from files, allocating the whole model again would take its whole memory.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not any(t.is_meta for t in tensors):
        return
    unit = _Unit(name=name, module=module, ancestors=ancestors, recurse=True)
    if _has_rule(module) and all(t.is_meta for t in module.parameters()) and not _is_peft(module):
        yield unit
        return
    if _is_peft(module) and hasattr(module, "reset_lora_parameters"):
        yield from _units_of_children(module, name, ancestors, only="base_layer")
        yield _Unit(name=name, module=module, ancestors=ancestors, recurse=True)
        return
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(t.is_meta for t in own):
        yield _Unit(name=name, module=module, ancestors=ancestors, recurse=False)
    yield from _units_of_children(module, name, ancestors)


def _units_of_children(
    module: nn.Module, name: str, ancestors: tuple[nn.Module, ...], only: str | None = None
) -> Iterator[_Unit]:
    for child_name, child in module.named_children():
        if only is None or child_name == only:
            path = f"{name}.{child_name}" if name else child_name
            yield from _units(child, path, (*ancestors, module))


def _has_rule(module: nn.Module) -> bool:
    names = ("_init_weights", "reset_parameters", "_reset_parameters")
    return any(callable(getattr(module, name, None)) for name in names)


def _is_peft(module: nn.Module) -> bool:
    """Return whether the module has adapters, which have rules of their own around a model with another."""
    return any(
        hasattr(m, "reset_lora_parameters") or hasattr(m, "peft_config") for m in module.modules()
    )


def _initialize_unit(unit: _Unit) -> Iterator[Initialised]:
    missing = {name: t for name, t in _tensors(unit.module, recurse=unit.recurse) if t.is_meta}
    results = []
    floating = all(t.is_floating_point() or t.is_complex() for t in missing.values())
    state = torch.get_rng_state()
    # A tensor that still holds the filling has no rule. Integers have no NaN, so two fillings tell.
    for filling in (None,) if floating else (0, 1):
        torch.set_rng_state(state)
        with _scratch(unit, filling) as scratch:
            _apply_rules(unit)
            results.append(scratch)
    magnitudes = {id(m): owner for owner, m in magnitudes_of(unit.module) if m.is_meta}
    for name, target in missing.items():
        if id(target) in magnitudes:
            start_later(magnitudes[id(target)])
            yield unit.full_name(name), target, torch.ones(whole_shape(target), dtype=target.dtype)
            continue
        made = [result[id(target)] for result in results]
        if not target.is_meta or not _is_made(made):
            continue
        yield unit.full_name(name), target, made[0]
    rebuilt = {n: t for n, t in missing.items() if t.is_meta}
    yield from _rebuild_buffers(unit, rebuilt)


def _tensors(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def _is_made(made: list[Tensor]) -> bool:
    if made[0].is_floating_point() or made[0].is_complex():
        return not bool(torch.isnan(made[0].float()).any())
    return torch.equal(made[0], made[-1])


@contextmanager
def _scratch(unit: _Unit, filling: int | None) -> Iterator[dict[int, Tensor]]:
    """Replace all tensors below the unit by whole CPU tensors inside, and restore them afterwards.

    All of them, because a rule may write to submodules, whose tensors may be loaded already.
    """
    owners = list(unit.module.modules())
    kept = [(o, dict(o._parameters), dict(o._buffers)) for o in owners]
    scratch: dict[int, Any] = {}
    for owner in owners:
        for tensors in (owner._parameters, owner._buffers):
            for name, t in tensors.items():
                if t is not None:
                    tensors[name] = scratch.setdefault(id(t), _filled(t, filling))
    try:
        yield scratch
        for owner, parameters, buffers in kept:
            _note_replaced(owner, {**parameters, **buffers}, scratch)
    finally:
        for owner, parameters, buffers in kept:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)


def _note_replaced(
    owner: nn.Module, before: dict[str, Tensor | None], scratch: dict[int, Any]
) -> None:
    """Take tensors that a rule made anew instead of writing to them, such as litgpt's cosines."""
    for name, t in before.items():
        made = owner._parameters.get(name, owner._buffers.get(name))
        if t is not None and made is not None and made.shape == whole_shape(t):
            scratch[id(t)] = made


def _filled(t: Tensor, filling: int | None) -> Any:
    has_nan = t.is_floating_point() or t.is_complex()
    value = float("nan") if has_nan else (filling or 0)
    whole = torch.empty(whole_shape(t), dtype=t.dtype, device="cpu").fill_(value)
    return nn.Parameter(whole, t.requires_grad) if isinstance(t, nn.Parameter) else whole


def _apply_rules(unit: _Unit) -> None:
    if hasattr(unit.module, "reset_lora_parameters"):
        _reset_adapters(unit.module, unit)
        return
    if not unit.recurse:
        _apply_rule(unit.module, unit.ancestors)
        return
    for module, ancestors in _children_first(unit.module, unit.ancestors):
        _apply_rule(module, ancestors)


def _children_first(
    module: nn.Module, ancestors: tuple[nn.Module, ...]
) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    for child in module.children():
        yield from _children_first(child, (*ancestors, module))
    yield module, ancestors


def _apply_rule(module: nn.Module, ancestors: tuple[nn.Module, ...]) -> None:
    """Apply the rule of the enclosing model if there is one, else the layer's own.

    A rule that leaves something out, such as litgpt's, which knows linears and embeddings, is for layers that have set
    themselves up in their constructors.
    """
    for model in (module, *reversed(ancestors)):
        rule = getattr(model, "_init_weights", None)
        if callable(rule):
            rule(module)
            if _has_unset(module) and _apply_own_rule(module):
                rule(module)
            return
    _apply_own_rule(module)


def _has_unset(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(t.is_floating_point() and bool(torch.isnan(t.float()).any()) for t in own)


def _apply_own_rule(module: nn.Module) -> bool:
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return True
    return False


def _reset_adapters(layer: Any, unit: _Unit) -> None:
    """Apply LoRA's own rule: the product of A and B starts as zero."""
    wrappers: list[Any] = [m for m in unit.ancestors if hasattr(m, "peft_config")]
    configs: dict[str, Any] = wrappers[0].peft_config if wrappers else {}
    for adapter in [*layer.lora_A, *layer.lora_embedding_A]:
        asked = getattr(configs.get(adapter), "init_lora_weights", True)
        if asked not in (True, "gaussian"):
            raise ValueError(
                f"init_lora_weights={asked!r} computes adapter {adapter!r} of {unit.name!r} from "
                "the base weights, which are on the meta device; use True or 'gaussian', or load "
                "the base model before adding adapters."
            )
        layer.reset_lora_parameters(adapter, asked)


def _rebuild_buffers(unit: _Unit, missing: dict[str, Tensor]) -> Iterator[Initialised]:
    """Yield constants that a constructor computes, by constructing the same module on the CPU."""
    for name, target in missing.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = unit.module.get_submodule(owner_name)
        if isinstance(target, nn.Parameter) or leaf not in owner._buffers:
            continue
        rebuilt = _reconstructed(owner)
        value = rebuilt._buffers.get(leaf) if rebuilt is not None else None
        if value is not None and value.shape == target.shape:
            yield unit.full_name(name), target, value


def _reconstructed(owner: nn.Module) -> nn.Module | None:
    """Construct the module once more on the CPU; None if an argument is unknown or its settings would differ."""
    construct: Callable[..., nn.Module] = type(owner)
    arguments: dict[str, Any] = {}
    for p in inspect.signature(construct).parameters.values():
        if p.name in ("device", "dtype"):
            continue
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name not in vars(owner):
            return None
        arguments[p.name] = vars(owner)[p.name]
    with torch.device("cpu"):
        rebuilt = construct(**arguments)
    return rebuilt if _settings(rebuilt) == _settings(owner) else None


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that a constructor has set: equal settings make equal constants."""
    return {
        k: v
        for k, v in vars(module).items()
        if isinstance(v, _PLAIN) and not k.startswith("_") and k != "training"
    }


def _refuse_rest(module: nn.Module) -> None:
    for name, t in _tensors(module, recurse=True):
        if t.is_meta:
            kind = "parameter" if isinstance(t, nn.Parameter) else "buffer"
            owner = module.get_submodule(name.rpartition(".")[0])
            raise ValueError(
                f"{kind} {name!r} is on the meta device, and {type(owner).__name__} does not say "
                "what it starts as; give the module a reset_parameters() that sets it, load "
                "weights that have it, or build the model without the meta device."
            )
