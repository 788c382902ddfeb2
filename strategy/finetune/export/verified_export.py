"""Compares the logits of exported files with those of the run's own model, with one layer in memory at a time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]  # peft needs it
import peft
import torch
import transformers
from torch import Tensor, nn

from thunder_memsave.checkpoints.sources import TensorSource, open_source
from thunder_memsave.errors import ExportError
from thunder_memsave.finetune.export.exported_files import PlainModel, names_of_tensors
from thunder_memsave.finetune.export.layerwise import logits_of
from thunder_memsave.finetune.export.trained_model import TrainedModel
from thunder_memsave.finetune.model.build import build_base
from thunder_memsave.finetune.model.task import CAUSAL_LM
from thunder_memsave.finetune.model.weight_names import stored_names
from thunder_memsave.materialize.pending_weights import reads_from_files

LIMIT = 1e-6
"""Largest norm of the logits' difference, relative to the norm of the logits, before rounding of weights."""

_NUM_TOKENS = 16
_NOTHING = "nothing was exported."


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Difference between the exported and the trained model: norms relative to the norm of the logits."""

    difference: float
    from_rounding: float
    """Change by rounding the weights to the dtype of the files; 0 if none was rounded."""


def verify_adapter(trained: TrainedModel, directory: Path) -> Verified:
    """Load the adapter with peft onto the base, and compare the logits.

    Raises:
        ExportError: the logits differ.
    """
    base: Any = build_base(trained.config)
    dtype = next(p.dtype for p in base.parameters() if p.is_floating_point())
    _give_constants(base, base.config)
    adapted = _with_adapter(base, directory)
    files = reads_from_files(adapted)
    ids = _input_ids(base.config)
    ours = logits_of(adapted, ids, lambda n: trained.as_trained(n, files[n]().to(dtype)))
    theirs = _logits_of_run(trained, ids)
    return Verified(difference=_checked(ours, theirs, trained), from_rounding=0.0)


def _with_adapter(base: nn.Module, directory: Path) -> nn.Module:
    """Let peft load the adapter, whose weights it would put on meta along with the base's."""
    zero = torch.zeros((), dtype=torch.float64)
    for owner in base.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                owner._parameters[name] = nn.Parameter(zero.expand(p.shape), requires_grad=False)
    with warnings.catch_warnings():
        # peft asks transformers for an attribute that transformers is renaming.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted: nn.Module = peft.PeftModel.from_pretrained(
            base,
            str(directory),
            low_cpu_mem_usage=True,  # else it makes weights, and then replaces them
            autocast_adapter_dtype=False,
            torch_device="cpu",
        )
    for owner in adapted.modules():
        for name, p in owner._parameters.items():
            if p is not None and p.data_ptr() == zero.data_ptr():
                owner._parameters[name] = nn.Parameter(p.to("meta"), requires_grad=False)
    return adapted


def verify_whole_model(trained: TrainedModel, plain: PlainModel, directory: Path) -> Verified:
    """Compare each weight in the files with its value, and the logits of the unrounded values with the run's.

    Raises:
        ExportError: a weight is missing or differs from its rounded value, or the logits differ.
    """
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    model = _on_meta(config)
    files = open_source(directory)
    names = stored_names(model, files.names())
    source = names.source(files)
    file_names = _file_names(model, source, names.of)
    rounded: set[str] = set()

    def value(name: str) -> Tensor:
        file_name = file_names[name]
        stored, exact = source.read(file_name), plain.whole(file_name)
        if not torch.equal(stored, exact.to(stored.dtype)):
            raise ExportError(
                f"the weight {file_name!r} in the files is not the one that was trained; {_NOTHING}"
            )
        if not torch.equal(stored.to(exact.dtype), exact):
            rounded.add(file_name)
        return exact

    ids = _input_ids(config)
    theirs = _logits_of_run(trained, ids)
    difference = _checked(logits_of(model, ids, value), theirs, trained)
    if not rounded:
        return Verified(difference=difference, from_rounding=0.0)
    ours = logits_of(model, ids, lambda name: source.read(file_names[name]))
    return Verified(difference=difference, from_rounding=_distance(ours, theirs))


def _file_names(
    model: nn.Module, source: TensorSource, stored: Mapping[str, str]
) -> dict[str, str]:
    """Map all names of the model, tied twins included, to those in the source of its files."""
    names = {}
    for group in names_of_tensors(model):
        found = [stored[name] for name in group if name in stored]
        if len(found) != 1:
            raise ExportError(f"the files hold {found} for {group}, and not one weight; {_NOTHING}")
        names.update(dict.fromkeys(group, found[0]))
    unused = set(source.names()) - set(names.values())
    if unused:
        raise ExportError(f"the files hold {sorted(unused)}, which the model has not; {_NOTHING}")
    return names


def _logits_of_run(trained: TrainedModel, ids: Tensor) -> Tensor:
    model: Any = trained.model
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    _give_constants(base, base.config)
    return logits_of(model, ids, trained.read)


def _on_meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = CAUSAL_LM.auto_class.from_config(config, dtype=torch.float32)
    _give_constants(model, config)
    return model


def _give_constants(model: nn.Module, config: Any) -> None:
    """Set buffers that no file has, such as frequencies of rotary embeddings, from a model not wholly on meta."""
    with accelerate.init_empty_weights(include_buffers=False):
        other: nn.Module = CAUSAL_LM.auto_class.from_config(config, dtype=torch.float32)
    for path, owner in other.named_modules():
        for name in owner._non_persistent_buffers_set:
            model.get_submodule(path)._buffers[name] = owner._buffers[name]


def _input_ids(config: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    num_ids = config.get_text_config().vocab_size
    return torch.randint(num_ids, (1, _NUM_TOKENS), generator=generator)


def _checked(ours: Tensor, theirs: Tensor, trained: TrainedModel) -> float:
    difference = _distance(ours, theirs)
    if not difference <= LIMIT:  # true for NaN too
        raise ExportError(
            f"the logits of the exported files differ from those of {trained.checkpoint} by {difference:.1e} of their "
            f"norm, and at most {LIMIT:.0e} may come from rounding; {_NOTHING} Please report it with the run file."
        )
    return difference


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
