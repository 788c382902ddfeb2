"""Adds an embedding's gradient where the head's is, for weights that the two share.

    t1 = to(g, float32)                                 ...
    ...                                                 ...
    t2 = embedding_dense_backward(h, ids, 128256, ...)  t1 = to(g, float32)
    t3 = add(t1, t2)                                    t3 = add_embedding_gradient(t1, h, ids, ...)

On the left, three tensors of the weight's shape are live at the end of backward, where all gradients are, and the
head's is there in float32 while all layers run. On the right there is one, and one in the dtype of the head's gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance

from thunder_memsave.ops.families.embedding_gradient import ADD_EMBEDDING_GRADIENT
from thunder_memsave.passes.repeatable import makes_new_memory
from thunder_memsave.passes.symbols import forward_symbols, is_cast, is_joint, with_others

_SUM = "aten_add_Tensor"
_EMBEDDING = "aten_embedding_dense_backward"
_VIEWS = ("aten_t", "aten_transpose_int", "aten_permute", "aten_view")
"""Operators whose result has each number of its operand in a place of its own."""


def add_embedding_gradients(trace: TraceCtx) -> TraceCtx:
    """Return the trace with embeddings' gradients added where other gradients are; the same one if there are none.

    Args:
        trace: A joint trace, with operations claimed by executors.
    """
    symbols = trace.bound_symbols
    if not is_joint(symbols) or not any(b.sym.name == _EMBEDDING for b in symbols):
        return trace
    found = _Sums(symbols)
    for index, bsym in enumerate(symbols):
        if bsym.sym.name == _SUM:
            found.look_at(index, bsym)
    new = with_others(trace, found.instead, found.left_out)
    if new is not trace:
        new.set_provenance(TraceProvenance("Joint pass add_embedding_gradients"))
    return new


class _Sums:
    """The symbols of a joint trace, and those that give way to others, by index."""

    def __init__(self, symbols: Sequence[BoundSymbol]) -> None:
        self.instead: dict[int, BoundSymbol] = {}
        self.left_out: set[int] = set()
        self._symbols = symbols
        self._forward = forward_symbols(symbols)
        self._made_at = {p.name: i for i, b in enumerate(symbols) for p in b.flat_proxy_outs}
        self._num_reads = Counter(p.name for b in symbols for p in b.flat_proxy_args)

    def look_at(self, index: int, bsym: BoundSymbol) -> None:
        """Let a sum of an embedding's gradient and a tensor that nothing else reads be made in the tensor's memory."""
        if bsym.kwargs or not all(isinstance(a, TensorProxy) for a in bsym.args):
            return
        for total, part in (bsym.args, bsym.args[::-1]):
            embedding = self._embedding(part, total, bsym.output)
            if embedding is not None and self._may_be_written(total):
                grad, indices, _, *others = self._symbols[embedding].args
                self.instead[index] = ADD_EMBEDDING_GRADIENT.bind(
                    *(total, grad, indices, *others), output=bsym.output
                )
                self._leave_out(embedding, total)
                return

    def _embedding(self, part: TensorProxy, total: TensorProxy, result: TensorProxy) -> int | None:
        """Return where an operand is made, if it is an embedding's gradient with fewer tokens than rows, read once."""
        made = self._made(part)
        if made is None or made.sym.name != _EMBEDDING or self._num_reads[part.name] != 1:
            return None
        _, indices, num_rows, *_ = made.args
        is_alike = len({(tuple(t.shape), t.dtype, t.device) for t in (part, total, result)}) == 1
        is_small = prod(indices.shape) < num_rows
        return self._made_at[part.name] if is_alike and is_small else None

    def _may_be_written(self, value: TensorProxy) -> bool:
        """Return whether backward makes it, in memory that nothing else reads."""
        made = self._made(value)
        if made is None or self._num_reads[value.name] != 1:
            return False
        if made.sym.name in _VIEWS:
            return self._may_be_written(made.args[0])
        return makes_new_memory(made)

    def _leave_out(self, embedding: int, total: TensorProxy) -> None:
        """Leave the embedding's gradient out; an earlier cast of the total from a smaller dtype takes its place."""
        index = self._made_at[total.name]
        made = self._symbols[index]
        is_wider = is_cast(made) and made.args[0].dtype.bytes < total.dtype.bytes
        if is_wider and index < embedding:
            self.instead[embedding] = made
            self.left_out.add(index)
        else:
            self.left_out.add(embedding)

    def _made(self, value: TensorProxy) -> BoundSymbol | None:
        """Return what makes a value in backward."""
        index = self._made_at.get(value.name)
        made = None if index is None else self._symbols[index]
        return None if made is None or id(made) in self._forward else made
