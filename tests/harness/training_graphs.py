"""Builds small training graphs, by hand or at random, for tests of the planner."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from thunder_memsave.planner.graph import Op, Repeat, Storage, StorageKind, TrainingGraph


@dataclass
class GraphBuilder:
    """Builds a graph from operations in order; `backward()` marks where backward begins."""

    storages: list[Storage] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    storage_of: dict[str, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    cotangents: set[int] = field(default_factory=set)
    num_forward: int | None = None

    def storage(self, name: str, nbytes: int, kind: StorageKind) -> int:
        self.storages.append(Storage(nbytes=nbytes, kind=kind, name=name))
        self.storage_of[name] = len(self.storages) - 1
        return len(self.storages) - 1

    def input(self, name: str, nbytes: int = 10, kind: StorageKind = "parameter") -> str:
        self.inputs.add(self.storage(name, nbytes, kind))
        return name

    def backward(self, **cotangents: int) -> None:
        self.num_forward = len(self.ops)
        for name, nbytes in cotangents.items():
            self.cotangents.add(self.storage(name, nbytes, "cotangent"))

    def op(
        self,
        reads: str,
        makes: dict[str, int],
        *,
        inside: int = 0,
        kind: StorageKind | None = None,
        repeat: Repeat = "yes",
        **fields: Any,
    ) -> None:
        """Add an operation: `reads` are names separated by spaces, `makes` bytes by name, `inside` temporary bytes."""
        default: StorageKind = "activation" if self.num_forward is None else "temporary"
        made = tuple(self.storage(name, n, kind or default) for name, n in makes.items())
        self._append(reads, tuple(makes), made, repeat, sum(makes.values()) + inside, fields)

    def view(self, base: str, *names: str) -> None:
        for name in names:
            self.storage_of[name] = self.storage_of[base]
        self._append(base, names, (), "free", 0, {})

    def write(self, target: str, name: str, reads: str = "") -> None:
        """Overwrite `target`, whose new value is called `name`."""
        self.storage_of[name] = self.storage_of[target]
        self._append(f"{target} {reads}", (name,), (), "no", 0, {})

    def graph(self, *, outputs: str, gradients: str = "") -> TrainingGraph:
        return TrainingGraph(
            storages=tuple(self.storages),
            ops=tuple(self.ops),
            num_forward=len(self.ops) if self.num_forward is None else self.num_forward,
            storage_of=self.storage_of,
            inputs=frozenset(self.inputs),
            outputs=frozenset(self.storage_of[name] for name in outputs.split()),
            gradients=frozenset(self.storage_of[name] for name in gradients.split()),
            cotangents=frozenset(self.cotangents),
        )

    def _append(
        self,
        reads: str,
        results: tuple[str, ...],
        makes: tuple[int, ...],
        repeat: Repeat,
        peak_bytes: int,
        fields: dict[str, Any],
    ) -> None:
        arguments = tuple(reads.split())
        self.ops.append(
            Op(
                symbol=fields.pop("symbol", "op"),
                index=len(self.ops),
                arguments=arguments,
                results=results,
                reads=tuple(dict.fromkeys(self.storage_of[name] for name in arguments)),
                makes=makes,
                peak_bytes=peak_bytes,
                repeat=repeat,
                **fields,
            )
        )


def chain(num_ops: int = 4, nbytes: int = 100) -> TrainingGraph:
    """Build `x -> a1 -> a2 -> ...`: the backward of each operation reads its input, and all weights get gradients."""
    b = GraphBuilder()
    b.input("a0", nbytes, "batch")
    for n in range(1, num_ops + 1):
        b.input(f"w{n}")
        b.op(f"a{n - 1} w{n}", {f"a{n}": nbytes}, flops=1)
    b.backward(**{f"g{num_ops}": nbytes})
    for n in range(num_ops, 0, -1):
        b.op(f"g{n} a{n - 1}", {f"dw{n}": 10}, kind="gradient")
        if n > 1:
            b.op(f"g{n} w{n}", {f"g{n - 1}": nbytes})
    return b.graph(
        outputs=f"a{num_ops}", gradients=" ".join(f"dw{n}" for n in range(1, num_ops + 1))
    )


def random_graph(seed: int, num_forward: int = 8) -> TrainingGraph:
    """Draw a graph with views, several results, writes in place, random operations, gathers, and unread values."""
    draw = random.Random(seed)
    b = GraphBuilder()
    b.input("x", 40, "batch")
    b.input("w", 30)
    values = ["x"]
    fixed: set[str] = {"x"}
    for n in range(num_forward):
        name = f"v{n}"
        read = draw.sample(values[-4:], k=min(len(values), draw.choice([1, 1, 2])))
        nbytes = draw.choice([8, 16, 64, 100, 128])
        what = draw.random()
        if what < 0.15:
            b.view(read[0], name)
        elif what < 0.25:
            b.op(" ".join(read), {name: nbytes, f"{name}b": draw.choice([8, 50])})
            values.append(f"{name}b")
        elif what < 0.33 and n > 1 and (fresh := _never_read(b, values)) is not None:
            b.write(fresh, name, read[0] if read[0] != fresh else "")
            values.remove(fresh)
        elif what < 0.45:
            b.op(" ".join(read), {name: nbytes}, repeat="replay")
        elif what < 0.52:
            b.op("w", {name: nbytes}, kind="gathered", sent_bytes=nbytes)
        elif what < 0.58:
            b.op(" ".join(read), {name: nbytes}, repeat="no")
        else:
            b.op(" ".join(read), {name: nbytes}, inside=draw.choice([0, 0, 30, 90]))
        values.append(name)
    forward = [v for v in values if v not in fixed]
    b.op(forward[-1], {"out": 20})
    b.backward(g=20)
    gradient, gradients = "g", []
    for n, value in enumerate(reversed(forward)):
        if draw.random() < 0.3:
            continue
        others = draw.sample(values, k=draw.choice([0, 0, 1]))
        b.op(" ".join([gradient, value, *others]), {f"h{n}": draw.choice([8, 64, 100])})
        gradient = f"h{n}"
        if draw.random() < 0.3:
            b.op(gradient, {f"dw{n}": 12}, kind="gradient")
            gradients.append(f"dw{n}")
    return b.graph(outputs="out", gradients=" ".join(gradients))


def _never_read(b: GraphBuilder, values: list[str]) -> str | None:
    """Return the newest value, if no operation has read it and no other value shares its memory."""
    newest = values[-1]
    storage = b.storage_of[newest]
    shared = sum(s == storage for s in b.storage_of.values()) > 1
    if storage in b.inputs or shared or any(newest in op.arguments for op in b.ops):
        return None
    return newest


def llama_like(
    num_layers: int, *, tokens: int = 8192, width: int = 8192, hidden: int = 28672, kv: int = 1024
) -> TrainingGraph:
    """Build a Llama's forward and backward as Thunder decomposes them, in bfloat16, without the parameters' bytes."""
    b = GraphBuilder()
    b.input("h0", 2 * tokens * width, "batch")
    for n in range(num_layers):
        _llama_block(b, n, tokens, width, hidden, kv)
    b.op(
        f"h{num_layers}",
        {"logits": 4 * tokens * 32000},
        flops=2 * tokens * width * 32000,
        dtype="bfloat16",
    )
    b.backward(g=4 * tokens * 32000)
    b.op(
        "g",
        {f"dh{num_layers}": 2 * tokens * width},
        flops=2 * tokens * width * 32000,
        dtype="bfloat16",
    )
    gradients = []
    for n in reversed(range(num_layers)):
        gradients += _llama_block_backward(b, n, tokens, width, hidden, kv)
    return b.graph(outputs="logits", gradients=" ".join(gradients))


def _llama_block(b: GraphBuilder, n: int, tokens: int, width: int, hidden: int, kv: int) -> None:
    wide, narrow, inner = 2 * tokens * width, 2 * tokens * kv, 2 * tokens * hidden

    def pointwise(reads: str, name: str, nbytes: int) -> None:
        moved = nbytes + sum(b.storages[b.storage_of[r]].nbytes for r in reads.split())
        b.op(
            reads,
            {f"{name}{n}": nbytes},
            moved_bytes=moved,
            key=f"{reads.count(' ')} {nbytes} {moved}",
        )

    def linear(read: str, name: str, size_in: int, nbytes: int) -> None:
        b.view(f"{read}{n}", f"{read}{name}_2d{n}")
        flops = size_in * nbytes
        b.op(
            f"{read}{name}_2d{n}",
            {f"{name}_2d{n}": nbytes},
            flops=flops,
            dtype="bfloat16",
            key=f"mm {flops}",
        )
        b.view(f"{name}_2d{n}", f"{name}{n}")

    def norm(read: str, name: str) -> None:
        pointwise(read, f"{name}_32_", 2 * wide)
        pointwise(f"{name}_32_{n}", f"{name}_square", 2 * wide)
        pointwise(f"{name}_square{n}", f"{name}_mean", 4 * tokens)
        pointwise(f"{name}_mean{n}", f"{name}_rstd", 4 * tokens)
        pointwise(f"{name}_32_{n} {name}_rstd{n}", f"{name}_scaled32_", 2 * wide)
        pointwise(f"{name}_scaled32_{n}", f"{name}_scaled", wide)
        pointwise(f"{name}_scaled{n}", name, wide)

    def rotated(name: str, nbytes: int) -> None:
        b.view(f"{name}{n}", f"{name}_heads{n}", f"{name}_half{n}")
        pointwise(f"{name}_half{n}", f"{name}_turned", nbytes)
        pointwise(f"{name}_heads{n}", f"{name}_cos", nbytes)
        pointwise(f"{name}_turned{n}", f"{name}_sin", nbytes)
        pointwise(f"{name}_cos{n} {name}_sin{n}", f"{name}_rotated", nbytes)

    norm(f"h{n}", "n1_")
    linear("n1_", "q", width, wide)
    linear("n1_", "k", width, narrow)
    linear("n1_", "v", width, narrow)
    rotated("q", wide)
    rotated("k", narrow)
    attention = f"q_rotated{n} k_rotated{n} v{n}"
    flops = 2 * tokens * tokens * width
    b.op(
        attention,
        {f"a{n}": wide, f"lse{n}": 256 * tokens},
        flops=flops,
        dtype="bfloat16",
        key="attention",
    )
    b.view(f"a{n}", f"a_t{n}")
    linear("a", "o", width, wide)
    pointwise(f"h{n} o{n}", "m", wide)
    norm(f"m{n}", "n2_")
    linear("n2_", "gate", width, inner)
    linear("n2_", "up", width, inner)
    pointwise(f"gate{n}", "gate_32_", 2 * inner)
    pointwise(f"gate_32_{n}", "silu_32_", 2 * inner)
    pointwise(f"silu_32_{n}", "silu", inner)
    pointwise(f"silu{n} up{n}", "product", inner)
    linear("product", "down", hidden, wide)
    pointwise(f"m{n} down{n}", "next", wide)
    b.storage_of[f"h{n + 1}"] = b.storage_of[f"next{n}"]
    b.view(f"next{n}", f"h{n + 1}")


def _llama_block_backward(
    b: GraphBuilder, n: int, tokens: int, width: int, hidden: int, kv: int
) -> list[str]:
    wide, narrow, inner = 2 * tokens * width, 2 * tokens * kv, 2 * tokens * hidden
    gradients: list[str] = []

    def pointwise(reads: str, name: str, nbytes: int) -> None:
        b.op(reads, {f"{name}{n}": nbytes})

    def linear(gradient: str, read: str, name: str, size_out: int, nbytes: int) -> None:
        b.view(f"{gradient}{n}", f"{gradient}{name}_2d{n}", f"{gradient}{name}_t{n}")
        b.op(
            f"{gradient}{name}_2d{n}",
            {f"{name}{n}": nbytes},
            flops=size_out * nbytes,
            dtype="bfloat16",
        )
        b.view(f"{read}{n}", f"{read}{name}_2d_{n}")
        b.op(f"{gradient}{name}_t{n} {read}{name}_2d_{n}", {f"dw_{name}{n}": 1024}, kind="gradient")
        gradients.append(f"dw_{name}{n}")

    def norm(gradient: str, name: str, read: str, other: str, made: str) -> None:
        pointwise(f"{gradient}{n} {name}_scaled{n}", f"{name}_dw_full", wide)
        pointwise(f"{name}_dw_full{n}", f"{name}_dw_sum", 2 * width)
        pointwise(f"{gradient}{n}", f"{name}_dscaled32_", 2 * wide)
        pointwise(f"{name}_dscaled32_{n} {name}_32_{n}", f"{name}_drstd_full", 2 * wide)
        pointwise(f"{name}_dscaled32_{n} {name}_rstd{n}", f"{name}_dx32_", 2 * wide)
        pointwise(f"{name}_drstd_full{n}", f"{name}_drstd", 4 * tokens)
        pointwise(f"{name}_drstd{n} {name}_mean{n}", f"{name}_dmean", 4 * tokens)
        pointwise(f"{name}_dmean{n} {name}_32_{n}", f"{name}_dsquare", 2 * wide)
        pointwise(f"{name}_dx32_{n} {name}_dsquare{n}", f"{name}_dsum32_", 2 * wide)
        pointwise(f"{name}_dsum32_{n}", f"{name}_dsum", wide)
        pointwise(f"{other} {name}_dsum{n}", made, wide)

    b.view(f"dh{n + 1}", f"dnext{n}")
    linear("dnext", "product", "dproduct", width, inner)
    pointwise(f"dproduct{n} silu{n}", "dup", inner)
    pointwise(f"dproduct{n} up{n}", "dsilu", inner)
    linear("dup", "n2_", "dn2_up", hidden, wide)
    pointwise(f"dsilu{n}", "dsilu_32_", 2 * inner)
    pointwise(f"gate_32_{n}", "sigmoid", 2 * inner)
    pointwise(f"sigmoid{n} gate_32_{n} dsilu_32_{n}", "dgate_32_", 2 * inner)
    pointwise(f"dgate_32_{n}", "dgate", inner)
    linear("dgate", "n2_", "dn2_gate", hidden, wide)
    pointwise(f"dn2_up{n} dn2_gate{n}", "dn2_", wide)
    norm("dn2_", "n2_", f"m{n}", f"dnext{n}", "dm")
    linear("dm", "a", "da", width, wide)
    attention = f"da{n} q_rotated{n} k_rotated{n} v{n} a{n} lse{n}"
    b.op(
        attention,
        {f"dq{n}": wide, f"dk{n}": narrow, f"dv{n}": narrow},
        flops=5 * tokens * tokens * width,
    )
    pointwise(f"dq{n}", "dq_rotated", wide)
    pointwise(f"dk{n}", "dk_rotated", narrow)
    linear("dv", "n1_", "dn1_v", kv, wide)
    linear("dk_rotated", "n1_", "dn1_k", kv, wide)
    pointwise(f"dn1_v{n} dn1_k{n}", "dn1_vk", wide)
    linear("dq_rotated", "n1_", "dn1_q", width, wide)
    pointwise(f"dn1_vk{n} dn1_q{n}", "dn1_", wide)
    norm("dn1_", "n1_", f"h{n}", f"dm{n}", "dprevious")
    b.view(f"dprevious{n}", f"dh{n}")
    return gradients
