"""Makes the optimizer of a run: with states in fewer bits, or with PyTorch's fused kernel if there is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from thunder_memsave.finetune.run_file.classes.class_kinds import IMPLEMENTATIONS
from thunder_memsave.finetune.run_file.classes.class_spec import build, import_class
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig
from thunder_memsave.optim.on_host import class_of
from thunder_memsave.settings.problems import ConfigError

_WITH_FUSED_KERNELS = (Adam, AdamW, SGD)
_WITH_FEWER_BITS = (Adam, AdamW, SGD)
"""Those of PyTorch that `thunder_memsave.optim` has too, under the same names."""


def make_optimizer(
    config: RunConfig, parameters: Iterable[Tensor], *, device_type: str
) -> Optimizer:
    """Make the optimizer that the run file names.

    PyTorch's default on CUDA, `foreach`, holds a copy of all parameters during the update, and a fused kernel
    holds none, so it is used unless the run file chooses an implementation.

    Args:
        config: The run.
        parameters: The trained parameters.
        device_type: Type of their device, such as `cuda`.

    Raises:
        ConfigError: the class or one of its arguments cannot be used.
    """
    trained = list(parameters)
    spec: ClassSpec = config.optimizer
    if states_of(config) is not None:
        spec = _with_fewer_bits(config)
    elif _has_kernel(spec, trained, device_type=device_type):
        spec = ClassSpec(
            class_path=spec["class_path"],
            init_args={**(spec.get("init_args") or {}), "fused": True},
        )
    made = build(spec, trained, where="optimizer", default_module="torch.optim")
    return cast(Optimizer, made)


def states_of(config: RunConfig) -> str | None:
    """Return the format of states if the run needs an optimizer of ours for it; None: PyTorch's own does it."""
    spec, trainable_dtype = config.optimizer, config.model.trainable_dtype
    states = spec.get("states", trainable_dtype)
    is_torchs = "states" not in spec or states == trainable_dtype == "float32"
    return None if is_torchs and spec.get("rounding", "nearest") == "nearest" else states


def has_fewer_bits(config: RunConfig) -> bool:
    """Tell whether the run's optimizer is one that can have its states in fewer bits."""
    cls = import_class(config.optimizer, where="optimizer", default_module="torch.optim")
    return cls in _WITH_FEWER_BITS


def _with_fewer_bits(config: RunConfig) -> ClassSpec:
    spec = config.optimizer
    cls = import_class(spec, where="optimizer", default_module="torch.optim")
    settings: dict[str, Any] = {k: v for k, v in spec.items() if k in ("states", "rounding")}
    if not has_fewer_bits(config):
        key, value = next(iter(settings.items()))
        raise ConfigError(
            f"optimizer.{key} is {value!r}, which {cls.__name__} does not have; Adam, AdamW and SGD do: name one of "
            f"them, or leave optimizer.{key} out.",
            key=f"optimizer.{key}",
        )
    own = {**settings, "states": states_of(config), "seed": config.train.seed}
    return ClassSpec(
        class_path=f"thunder_memsave.optim.{cls.__name__}",
        init_args={**(spec.get("init_args") or {}), **own},
    )


def place_steps(optimizer: Optimizer) -> None:
    """Move loaded step counts to the device where each group's implementation reads them.

    Fused and capturable kernels read them on the device of the weights, the others on the CPU.
    """
    for group in optimizer.param_groups:
        is_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(step := state.get("step"), Tensor):
                state["step"] = step.to(parameter.device if is_on_device else "cpu")


def chooses_implementation(spec: ClassSpec) -> bool:
    """Tell whether the run file chooses the implementation of updates."""
    return any(name in IMPLEMENTATIONS for name in spec.get("init_args") or {})


def _has_kernel(spec: ClassSpec, trained: list[Tensor], *, device_type: str) -> bool:
    cls = import_class(spec, where="optimizer", default_module="torch.optim")
    if cls not in _WITH_FUSED_KERNELS or chooses_implementation(spec):
        return False
    is_known = device_type in _get_fused_kernels_supported_devices()
    return is_known and all(p.is_floating_point() for p in trained)


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Tell whether a flag on the device can make the optimizer leave a step out, as gradient scalers do."""
    return class_of(optimizer) in _WITH_FUSED_KERNELS and all(
        group.get("fused") for group in optimizer.param_groups
    )


@contextmanager
def skipped_if(optimizer: Optimizer, flag: Tensor) -> Iterator[None]:
    """Let the fused kernels of the steps inside change nothing where `flag`, float32 on their device, is 1."""
    optimizer.grad_scale, optimizer.found_inf = None, flag  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
