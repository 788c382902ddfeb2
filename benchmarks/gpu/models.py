"""Models of known shapes with random weights, and one training step of them in several ways."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from gpu.checks import Target, WrongError
from thunder_memsave.config import Fp8Config, MemoryConfig
from thunder_memsave.errors import BudgetError
from thunder_memsave.strategy import ThunderMemsaveStrategy

GIB = 2**30
_TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama; on a CPU its layers are tiny."""

    name: str
    layers: int
    hidden: int
    wide: int
    heads: int
    key_heads: int
    tied: bool = False
    vocabulary: int = 128256

    def sizes(self, target: Target) -> dict[str, Any]:
        """Return its entries in a `LlamaConfig`."""
        if not target.is_cuda:
            return {**_TINY, "num_hidden_layers": min(2, self.layers)}
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.wide,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
        }


def llama_8b(layers: int) -> Shape:
    """Return so many layers of Llama 3.1 8B, which has 32."""
    return Shape(
        name=f"8B, {layers} layers", layers=layers, hidden=4096, wide=14336, heads=32, key_heads=8
    )


LLAMA_1B = Shape(
    name="Llama 3.2 1B", layers=16, hidden=2048, wide=8192, heads=32, key_heads=8, tied=True
)


def llama(shape: Shape, target: Target, *, length: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Make the model on the device, the same weights for the same shape."""
    config = transformers.LlamaConfig(
        **shape.sizes(target),
        max_position_embeddings=length,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(target.device), default_dtype(dtype):
        return transformers.LlamaForCausalLM(config).train()


def with_lora(model: Any) -> Any:
    """Add adapters of rank 16 to all linear layers; they are float32, as peft makes them."""
    import peft

    config = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def token_ids(model: Any, target: Target, *, rows: int, length: int) -> Tensor:
    """Draw rows of tokens."""
    return torch.randint(0, model.config.vocab_size, (rows, length), device=target.device)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, kw_only=True)
class Ours:
    """A model that Fabric set up with the strategy, and one optimizer step of it."""

    strategy: ThunderMemsaveStrategy
    module: Any
    step: Callable[[], None]

    @property
    def predicted_bytes(self) -> int:
        """The predicted peak of the newest plan."""
        assert self.strategy.plan is not None
        return self.strategy.plan.predicted_peak_bytes


def ours(
    model: Any,
    ids: Tensor,
    target: Target,
    *,
    memory: Mapping[str, Any] | MemoryConfig | None = None,
    fp8: Mapping[str, Any] | Fp8Config | None = None,
    precision: Any = "32-true",
    micro_batches: int = 1,
    cuda_graphs: bool = False,
    fusion: Literal["auto"] | bool = "auto",
    max_norm: float | None = None,
) -> Ours:
    """Set a model up; the loss is the model's own, so the plan covers it. A step has AdamW, fused.

    With `max_norm` gradients are clipped to it before.
    """
    from lightning.fabric import Fabric

    strategy = ThunderMemsaveStrategy(
        memory=memory, fp8=fp8, cuda_graphs=cuda_graphs, fusion=fusion
    )
    fabric = Fabric(accelerator=target.device, devices=1, strategy=strategy, precision=precision)
    fabric.launch()
    module = fabric.setup(model)
    optimizer: Any = fabric.setup_optimizers(_adamw(model))

    def step() -> None:
        for number in range(micro_batches):
            with fabric.no_backward_sync(module, enabled=number + 1 < micro_batches):
                fabric.backward(module(input_ids=ids, labels=ids).loss)
        if max_norm is not None:
            fabric.clip_gradients(module, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return Ours(strategy=strategy, module=module, step=step)


def plain(
    model: Any, module: Any, ids: Tensor, *, autocast: torch.dtype | None
) -> Callable[[], None]:
    """Return the same step for `module`, an eager or compiled form of `model`, without Fabric."""
    optimizer = _adamw(model)

    def step() -> None:
        with torch.autocast(ids.device.type, dtype=autocast, enabled=autocast is not None):
            loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _adamw(model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def compiled(model: Any, *, checkpointed: bool) -> Any:
    """Compile a model's decoder layers with torch.compile in place, each checkpointed as a whole if asked."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = model.model.layers
    for number, layer in enumerate(layers):
        wrapped = checkpoint_wrapper(layer) if checkpointed else layer
        layers[number] = torch.compile(wrapped)
    return model


def synchronized_s(target: Target) -> float:
    """Return a clock's seconds, with nothing left to do on the device."""
    if target.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def free(target: Target) -> None:
    """Give back what nobody holds any more, and count peaks from here on."""
    gc.collect()
    if target.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def smallest_bytes(step_within: Callable[[int], object]) -> int:
    """Return the smallest budget that has a plan, by asking for one byte.

    Args:
        step_within: Sets a model up with a budget of so many bytes, and takes a step.
    """
    try:
        step_within(1)
    except BudgetError as error:
        smallest = error.smallest_bytes
    else:
        raise WrongError("a budget of one byte was not refused")
    assert smallest is not None
    return smallest
