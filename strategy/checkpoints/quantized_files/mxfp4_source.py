"""A source whose files hold stacks of weights in MXFP4, as gpt-oss: each is there dequantised, and as bytes.

Of a weight `w`, which the model has as `[experts, in, out]`, a file has, as transformers reads it:

    w_blocks    uint8, [experts, out, in / 32, 16], the codes of two elements in each byte
    w_scales    uint8, [experts, out, in / 32], the scale of each block of 32

Our bytes of an expert are its scales, then its codes (`stored_weights/mxfp4.py`).

Source: transformers 5.23, `integrations/mxfp4.py`, `convert_moe_packed_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_memsave.checkpoints.sources import TensorSource, TensorSpec
from thunder_memsave.stored_weights.format import QuantizedFilesError, StoredFormat
from thunder_memsave.stored_weights.formats import MXFP4_TRANSPOSED
from thunder_memsave.stored_weights.mxfp4 import (
    BLOCK,
    BLOCK_BYTES,
    NOT_A_NUMBER,
    dequantize_transposed,
)

_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """What the headers of the files say of one weight, checked."""

    num_experts: int
    num_outs: int
    num_blocks: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.num_experts, self.num_blocks * BLOCK, self.num_outs])


def parts_in_mxfp4(source: TensorSource) -> dict[str, TensorSpec]:
    """Return, by the name of each weight in MXFP4, the spec of its codes.

    Raises:
        QuantizedFilesError: Codes have no scales, or scales no codes, or they are of other shapes or dtypes.
    """
    names = frozenset(source.names())
    stems = {
        name.removesuffix(suffix)
        for name in names
        for suffix in (_BLOCKS, _SCALES)
        if name.endswith(suffix)
    }
    found = {}
    for stem in sorted(stems):
        specs = [source.spec(stem + s) if stem + s in names else None for s in (_BLOCKS, _SCALES)]
        if any(spec is not None and spec.dtype == torch.uint8 for spec in specs):
            found[stem] = _checked(stem, *specs)
    return found


class Mxfp4Source:
    """Tensors of another source; those in MXFP4 are read in bfloat16, which has them exactly, or as our bytes."""

    def __init__(self, source: TensorSource, codes_of: dict[str, TensorSpec]) -> None:
        """Read nothing yet.

        Args:
            source: Has the parts of weights in MXFP4 under names of their own.
            codes_of: What `parts_in_mxfp4` found in it.
        """
        self._source = source
        self._stacks = {
            name: _Stack(num_experts=s.shape[0], num_outs=s.shape[1], num_blocks=s.shape[2])
            for name, s in codes_of.items()
        }

    def names(self) -> Iterable[str]:
        """Return all names, of weights in MXFP4 their own."""
        parts = {name + suffix for name in self._stacks for suffix in (_BLOCKS, _SCALES)}
        return [*(name for name in self._source.names() if name not in parts), *self._stacks]

    def format_of(self, name: str) -> StoredFormat | None:
        """Return MXFP4 if the files have this weight so."""
        return MXFP4_TRANSPOSED if name in self._stacks else None

    def spec(self, name: str) -> TensorSpec:
        """Return the shape and dtype of the whole tensor, dequantised."""
        if name not in self._stacks:
            return self._source.spec(name)
        return TensorSpec(shape=self._stacks[name].shape, dtype=torch.bfloat16)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read some rows, or all; of a weight in MXFP4 only these experts.

        Raises:
            QuantizedFilesError: A scale of these is no number.
        """
        if name not in self._stacks:
            return self._source.read(name, rows)
        stored = self.stored(name, rows)
        shape = torch.Size([len(stored), *self._stacks[name].shape[1:]])
        return dequantize_transposed(stored, shape, torch.bfloat16)

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """Return the bytes of some experts, or all, without quantising them again: uint8, `[experts, bytes]`.

        Raises:
            QuantizedFilesError: A scale of these is no number.
        """
        scales, codes = (self._source.read(name + suffix, rows) for suffix in (_SCALES, _BLOCKS))
        if bool((scales == NOT_A_NUMBER).any()):
            raise _odd(name, f"has scales of {NOT_A_NUMBER}, which is no number")
        return torch.cat([scales.flatten(1), codes.flatten(1)], dim=1)


def _checked(name: str, codes: TensorSpec | None, scales: TensorSpec | None) -> TensorSpec:
    if codes is None or scales is None:
        has, lacks = (_SCALES, _BLOCKS) if codes is None else (_BLOCKS, _SCALES)
        raise _odd(name, f"has {name + has}, but no {name + lacks}")
    for suffix, spec in ((_BLOCKS, codes), (_SCALES, scales)):
        if spec.dtype != torch.uint8:
            raise _odd(name, f"has {name + suffix} in {_shown(spec.dtype)}, not uint8")
    if len(codes.shape) != 4 or codes.shape[3] != BLOCK_BYTES:
        raise _odd(
            name,
            f"has {name + _BLOCKS} of shape {tuple(codes.shape)}, not (experts, outputs, blocks, {BLOCK_BYTES})",
        )
    if scales.shape != codes.shape[:3]:
        raise _odd(
            name,
            f"has {name + _SCALES} of shape {tuple(scales.shape)}, not {tuple(codes.shape[:3])}, one for each block",
        )
    return codes


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _odd(name: str, fact: str) -> QuantizedFilesError:
    return QuantizedFilesError(
        f"{name} of the weight files {fact}, so it is not in MXFP4 as gpt-oss has it; download the files again, or "
        "name a model whose weights are in bfloat16.",
        key="model.name_or_path",
    )
