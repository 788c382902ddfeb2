"""Refuses models and optimizers that cannot be set up."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from thunder_memsave.config import ConfigError, MemoryConfig
from thunder_memsave.optim.muon import MuonByRows, update_by_rows
from thunder_memsave.optim.on_host import states_on_host
from thunder_memsave.sharding.sharded_parameter import is_sharded

# Class name by defining module: a lookup in `sys.modules` imports none of them.
_WRAPPERS = (
    ("thunder.core.module", "ThunderModule", "pass the model as it was before thunder.jit"),
    ("torch._dynamo", "OptimizedModule", "pass the model as it was before torch.compile"),
    ("torch.nn.parallel", "DistributedDataParallel", "pass the model that it wraps"),
    ("torch.nn", "DataParallel", "pass the model that it wraps"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "pass the model that it wraps"),
    ("torch.distributed.fsdp", "FSDPModule", "pass the model without fully_shard"),
)

# These normalise, factor or orthogonalise whole weights, and would do so to each rank's rows. `torch.optim.Muon` itself
# is served by `optim/muon.py`; classes derived from it may compute anything.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")


def fit_optimizer(optimizer: Optimizer, memory: MemoryConfig) -> None:
    """Fit an optimizer to sharded weights, and to settings that keep its states on the host.

    Muon is made to update sharded weights. PyTorch's optimizers whose step on shards differs from that on wholes are
    refused.

    Raises:
        ConfigError: it is one of those; the message says what to use.
        ValueError: it has taken a step on the whole weights.
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(is_sharded(p) for p in parameters):
        _fit_to_shards(optimizer)
    if memory.offloads_optimizer:
        states_on_host(optimizer)


def _fit_to_shards(optimizer: Optimizer) -> None:
    if type(optimizer) is Muon:
        update_by_rows(optimizer)
    for name in _NOT_ELEMENTWISE:
        cls = getattr(torch.optim, name, None)
        if cls is not None and isinstance(optimizer, cls) and type(optimizer) is not MuonByRows:
            raise ConfigError(
                f"{type(optimizer).__name__} computes with whole weights, and every rank has only its rows of them; "
                "use an elementwise optimizer such as AdamW or SGD, or sharding='none'."
            )
    for parameter, state in optimizer.state.items():
        _refuse_whole_state(parameter, state)


def _refuse_whole_state(parameter: Tensor, state: Mapping[str, Any]) -> None:
    whole = getattr(parameter, "unsharded_shape", parameter.shape)
    if whole == parameter.shape:
        return
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == whole:
            raise ValueError(
                f"the optimizer's state {name!r} has the whole weight's shape {tuple(whole)}, but "
                f"the weight is sharded now; set the optimizer up before its first step, and load "
                "its state with fabric.load()."
            )


def refuse_unsuitable(module: nn.Module) -> None:
    """Refuse a model that is compiled, distributed or set up already, or contains TransformerEngine modules.

    Raises:
        ValueError: it is one of these; the message says what to pass instead.
    """
    if _fabric_will_recompile():
        raise ValueError(
            "the model was compiled with torch.compile, and Fabric would compile it again around "
            "the strategy's own compiled forward; thunder_memsave compiles the model itself: pass "
            "the model as it was before torch.compile."
        )
    for name, submodule in module.named_modules():
        _refuse_wrapper(submodule, name or "the model")
        _refuse_transformer_engine(submodule, name or "the model")
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "unsharded_shape"):
            raise ValueError(
                f"the model was set up before (its parameter {name!r} was); set a model up once, "
                "and use the module that fabric.setup() returned."
            )


def _refuse_wrapper(module: nn.Module, name: str) -> None:
    for cls, advice in _loaded_wrappers():
        if isinstance(module, cls):
            raise ValueError(
                f"{name} is a {cls.__name__}; thunder_memsave compiles and distributes the model "
                f"itself: {advice}."
            )
    # `module.compile()` leaves the class alone and replaces the call.
    if module._compiled_call_impl is not None:
        raise ValueError(
            f"{name} was compiled in place with Module.compile(); thunder_memsave compiles the "
            "model itself: leave that call out."
        )


def _refuse_transformer_engine(module: nn.Module, name: str) -> None:
    if any(
        cls.__module__.partition(".")[0] == "transformer_engine" for cls in type(module).__mro__
    ):
        raise ValueError(
            f"{name} is TransformerEngine's {type(module).__name__}, whose computation cannot be "
            "captured; put the module of torch.nn in its place: with `fp8` set, nn.Linear computes with "
            "TransformerEngine's kernels. In eager code, thunder_memsave.checkpoint() serves such modules."
        )


def _loaded_wrappers() -> Iterator[tuple[type, str]]:
    for home, name, advice in _WRAPPERS:
        cls = getattr(sys.modules.get(home), name, None)
        if isinstance(cls, type):
            yield cls, advice


def _fabric_will_recompile() -> bool:
    """Tell whether the `Fabric.setup` that called us removed a torch.compile wrapper from the model.

    Fabric hands the strategy the bare model and compiles what the strategy returns; no argument
    says so, only its own local variable does.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        in_fabric = frame.f_globals.get("__name__") == "lightning.fabric.fabric"
        if in_fabric and "compile_kwargs" in frame.f_locals:
            return frame.f_locals["compile_kwargs"] is not None
        frame = frame.f_back
    return False
