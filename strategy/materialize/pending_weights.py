"""Records the files that will fill a module on the meta device, and reads what they hold."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from thunder_memsave.checkpoints.quantized_files.stored_source import (
    format_in_files,
    with_dequantized,
)
from thunder_memsave.checkpoints.sources import (
    StateDictSource,
    TensorSource,
    open_source,
)

Rename = Callable[[str], str | None]
PENDING = "_thunder_memsave_weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingWeights:
    """The files that will fill a submodule, once each rank knows its rows."""

    source: TensorSource
    rename: Rename


def without_adapters(name: str) -> str | None:
    """Return a parameter's name before `peft` wrapped the model; None for a parameter that `peft` added."""
    if re.search(r"(^|\.)lora_|(^|\.)ia3_|(^|\.)prompt_encoder\.", name):
        return None
    name = name.removeprefix("base_model.model.")
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)", "", name)


def load_on_setup(
    module: nn.Module,
    weights: str | Path | Mapping[str, Tensor] | TensorSource,
    *,
    rename: Rename = without_adapters,
) -> None:
    """Fill `module`, which is on the meta device, from files when it is set up.

    The module may be wrapped until then; `rename` maps its names at setup to those in the files.

    Args:
        module: A model, or a part of one.
        weights: A safetensors file, a file with a state dict, or a model directory; or tensors, or their source.
        rename: Returns None for parameters that the files do not have; they are initialised.

    Raises:
        ValueError: There is nothing to read at `weights`, or `module` has values already.
        QuantizedFilesError: The files have weights in a format that is not read.
    """
    if not any(p.is_meta for p in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} was to be filled from {weights} on setup, and has values "
            "already; make it with fabric.init_module(empty_init=True), or call "
            "fabric.load_raw(path, model) after setup."
        )
    if isinstance(weights, Mapping):
        source = with_dequantized(StateDictSource(weights))
    else:
        source = open_weights(weights) if isinstance(weights, str | Path) else weights
    pending = PendingWeights(source=source, rename=rename)
    setattr(module, PENDING, pending)


def open_weights(path: str | Path) -> TensorSource:
    """Open files, as `open_source` does; quantised weights are there under their names alone.

    Raises:
        ValueError: There is nothing to read at `path`.
        QuantizedFilesError: The files have weights in a format that is not read.
    """
    return with_dequantized(open_source(path))


def names_in_files(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers that `load_on_setup` will fill, tied ones under each name.

    Call it before the module is set up.
    """
    filled: set[int] = set()
    for owner, pending in _pending(module):
        stored = set(pending.source.names())
        wanted = wanted_tensors(owner, pending.rename).values()
        filled |= {id(target) for stored_name, target in wanted if stored_name in stored}
    state = module.state_dict(keep_vars=True)
    return frozenset(name for name, value in state.items() if id(value) in filled)


def names_of_bytes_in_files(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that `load_on_setup` will fill from weights that files hold quantised."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        if isinstance(pending := vars(owner).get(PENDING), PendingWeights)
        for name, (stored_name, _) in wanted_tensors(owner, pending.rename).items()
        if format_in_files(pending.source, stored_name) is not None
    )


def reads_from_files(module: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return, by name, a function that reads each whole tensor that `load_on_setup` will fill; tied names too.

    Call it before the module is set up.
    """
    reads: dict[str, Callable[[], Tensor]] = {}
    for prefix, owner in module.named_modules():
        pending = vars(owner).get(PENDING)
        if not isinstance(pending, PendingWeights):
            continue
        stored = set(pending.source.names())
        for name, (stored_name, _) in wanted_tensors(owner, pending.rename).items():
            if stored_name in stored:
                full_name = f"{prefix}.{name}" if prefix else name
                reads.setdefault(full_name, partial(pending.source.read, stored_name))
    return reads


def fingerprint_of_files(module: nn.Module) -> str:
    """Hash the files that `load_on_setup` will read, without reading them whole.

    The hash covers names, shapes and dtypes of all tensors, and the values in each one's first row.
    """
    digest = hashlib.sha256()
    for _, pending in _pending(module):
        for name in sorted(pending.source.names()):
            spec = pending.source.spec(name)
            digest.update(f"{name} {tuple(spec.shape)} {spec.dtype}\n".encode())
            row = pending.source.read(name, slice(0, 1) if spec.shape else None)
            digest.update(row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _pending(module: nn.Module) -> Iterator[tuple[nn.Module, PendingWeights]]:
    for owner in module.modules():
        pending = vars(owner).get(PENDING)
        if isinstance(pending, PendingWeights):
            yield owner, pending


def wanted_tensors(owner: nn.Module, rename: Rename) -> dict[str, tuple[str, Tensor]]:
    """Return, by name, the parameters and buffers that files may have, each with its name there."""
    tensors: dict[str, Tensor] = dict(owner.named_parameters(remove_duplicate=False))
    tensors.update(owner.named_buffers(remove_duplicate=False))
    renamed = {name: rename(name) for name in tensors}
    return {n: (stored, tensors[n]) for n, stored in renamed.items() if stored is not None}
