"""Checks whole models: gradients equal eager's, and no plan changes a bit of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from gpu.checks import Check, Target, require
from gpu.kernels import error_of
from gpu.models import default_dtype
from thunder_memsave.finetune.model.documents_apart import take_boundaries
from thunder_memsave.finetune.process.deterministic import unfilled_choice
from thunder_memsave.ops.families.packed_attention import boundaries_of
from thunder_memsave.strategy import ThunderMemsaveStrategy

POLICIES = ("keep_all", "recompute_all")
VOCABULARY = 512
Gradients = Mapping[str, Tensor]

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it cuBLAS has other bits in every run; nor may `use_deterministic_algorithms` only warn: flash attention then
adds atomically."""


def gpt2(target: Target, dtype: torch.dtype) -> nn.Module:
    """Make a tiny GPT-2 without dropout."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=128,
        n_layer=_num_layers(target),
        n_head=2,
        n_positions=256,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config.loss_type = "ForCausalLM"
    with torch.device(target.device), default_dtype(dtype):
        return transformers.GPT2LMHeadModel(config)


def tiny_llama(target: Target, dtype: torch.dtype) -> nn.Module:
    """Make a tiny Llama with grouped queries."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=_num_layers(target),
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        use_cache=False,
    )
    with torch.device(target.device), default_dtype(dtype):
        return transformers.LlamaForCausalLM(config)


def _num_layers(target: Target) -> int:
    return 2 if target.is_cuda else 1


def rows(target: Target) -> dict[str, Any]:
    """Draw two rows of tokens.

    The labels are shifted here, so that `packed_rows` can leave out the padding.
    """
    ids = torch.randint(0, VOCABULARY, (2, 160), device=target.device)
    return {"input_ids": ids, "labels": ids, "shift_labels": ids.roll(-1, 1)}


def packed_rows(target: Target) -> dict[str, Any]:
    """Draw two rows of several documents, the first with padding."""
    ends = torch.tensor([[40, 100, 150], [80, 160, 160]], dtype=torch.int32, device=target.device)
    boundaries = boundaries_of(ends, 160)
    positions = torch.arange(160, device=target.device).expand(2, -1)
    batch = rows(target)
    batch["shift_labels"][0, 149:] = -100  # eager attends within the padding, ours does not
    return {**batch, "attention_mask": boundaries, "position_ids": positions}


def gradients(
    model: Any,
    batch: Mapping[str, Any],
    target: Target,
    *,
    memory: Mapping[str, Any],
    fusion: Literal["auto"] | bool = "auto",
    leave_out: tuple[str, ...] = (),
) -> Gradients:
    """Return loss and gradients of one step of the strategy, and of a second one after it."""
    from lightning.fabric import Fabric

    strategy = ThunderMemsaveStrategy(memory=memory, fusion=fusion, leave_out=leave_out)
    fabric = Fabric(accelerator=target.device, devices=1, strategy=strategy)
    fabric.launch()
    module = fabric.setup(model)
    return _two_steps(model, lambda: module(**batch), fabric.backward)


def eager_gradients(model: Any, batch: Mapping[str, Any]) -> Gradients:
    """Return the same of eager PyTorch."""
    return _two_steps(model, lambda: model(**batch), lambda loss: loss.backward())


def _two_steps(
    model: nn.Module, forward: Callable[[], Any], backward: Callable[[Tensor], object]
) -> Gradients:
    found = {}
    for step in range(2):
        output = forward()
        loss = output.loss if hasattr(output, "loss") else output
        backward(loss)
        found[f"loss of step {step}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{name} of step {step}"] = parameter.grad.detach().clone()
            parameter.grad = None
    return found


def parity(
    target: Target,
    *,
    make: Callable[[Target, torch.dtype], nn.Module],
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
) -> str:
    """Compare both extreme plans with each other by their bits, and with eager in float32."""
    torch.manual_seed(0)
    model = make(target, dtype)
    if packed:
        take_boundaries(model)
    batch = packed_rows(target) if packed else rows(target)
    exact = eager_gradients(copy.deepcopy(model).float(), batch)
    eager = eager_gradients(copy.deepcopy(model), batch)
    with unfilled_choice():
        kept, recomputed = (
            gradients(copy.deepcopy(model), batch, target, memory={"policy": policy})
            for policy in POLICIES
        )
    differing = [name for name in kept if not torch.equal(kept[name], recomputed[name])]
    require(
        not differing, f"{len(differing)} of {len(kept)} have other bits, first {differing[:1]}"
    )
    require(kept.keys() == exact.keys(), "other parameters have gradients than with eager")
    ours, theirs = (max(error_of(f[n], exact[n]) for n in exact) for f in (kept, eager))
    limit = 1e-4 if dtype is torch.float32 else 1.5 * theirs + 1e-3
    line = f"largest relative error {ours:.1e}, eager's {theirs:.1e}"
    require(ours <= limit, f"{line}, limit {limit:.1e}")
    return f"the same bits with {' and '.join(POLICIES)}; {line}"


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256),
            nn.GELU(),
            nn.Dropout(0.5),
            nn.Linear(256, 64),
            nn.Dropout(0.3),
            nn.Linear(64, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def dropout(target: Target) -> str:
    """Compare gradients of a module with dropout, kept and recomputed, and what is drawn afterwards."""
    torch.manual_seed(0)
    model = _Dropping().to(target.device)
    batch = {"x": torch.ones(32, 64, device=target.device)}
    found = []
    for policy in POLICIES:
        torch.manual_seed(7)
        grads = gradients(copy.deepcopy(model), batch, target, memory={"policy": policy})
        found.append({**grads, "next": torch.rand(8, device=target.device)})
    differing = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
    require(not differing, f"other bits: {differing[:3]}")
    first, second = (found[0][f"loss of step {step}"] for step in range(2))
    require(not torch.equal(first, second), "both steps drew the same numbers")
    return "recomputed dropout has forward's numbers, and the generator goes on alike"


def cuda_graphs(target: Target) -> str:
    """Train LoRA on packed rows with dropout and an accumulation of two, as graphs and without: the same bits."""
    import peft

    torch.manual_seed(0)
    base = tiny_llama(target, torch.bfloat16)
    take_boundaries(base)
    lora = peft.LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.25)
    model = peft.get_peft_model(base, lora)
    batches = [packed_rows(target) for _ in range(6)]
    with unfilled_choice():
        found = [
            _trained(copy.deepcopy(model), batches, target, cuda_graphs=graphs)
            for graphs in (False, True)
        ]
    differing = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
    require(not differing, f"other bits: {len(differing)} of {len(found[0])}, {differing[:3]}")
    return "losses and weights after three steps have the bits of steps without graphs"


def _trained(
    model: Any, batches: Sequence[Mapping[str, Any]], target: Target, *, cuda_graphs: bool
) -> Gradients:
    from lightning.fabric import Fabric

    # Dropout that is computed again has its state on the host, which no graph reads.
    strategy = ThunderMemsaveStrategy(cuda_graphs=cuda_graphs, memory={"policy": "keep_all"})
    fabric = Fabric(accelerator=target.device, devices=1, strategy=strategy)
    fabric.launch()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    module, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(7)
    found = {}
    for number, batch in enumerate(batches):
        loss = module(**batch).loss
        fabric.backward(loss / 2)
        found[f"loss of micro-batch {number}"] = loss.detach()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    (forward,) = strategy._modules
    graphed = None if forward.graphs is None else forward.graphs.call
    is_captured = graphed is not None and graphed.is_captured
    require(is_captured is cuda_graphs, f"captured: {is_captured}, asked for: {cuda_graphs}")
    return {**found, **{name: p.detach() for name, p in model.named_parameters()}}


_RUNS: dict[str, Callable[[Target], str]] = {
    "GPT-2, float32": partial(parity, make=gpt2),
    "Llama, float32": partial(parity, make=tiny_llama),
    "Llama, bfloat16": partial(parity, make=tiny_llama, dtype=torch.bfloat16),
    "Llama, bfloat16, packed rows": partial(
        parity, make=tiny_llama, dtype=torch.bfloat16, packed=True
    ),
    "dropout": dropout,
}

CHECKS = [
    *(
        Check(name=name, run=run, group="plans", limit_s=90, environment=ENVIRONMENT)
        for name, run in _RUNS.items()
    ),
    Check(
        name="CUDA graphs",
        run=cuda_graphs,
        group="plans",
        limit_s=90,
        environment=ENVIRONMENT,
        needs_cuda=True,
    ),
]
