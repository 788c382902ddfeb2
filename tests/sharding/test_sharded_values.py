"""A weight returned by a compiled call is whole; operations on rows are correct or refused, and no file gets rows."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.sharding.local_state import hide_padding
from thunder_memsave.sharding.row_errors import ShardedParameterError
from thunder_memsave.sharding.rows import gather_full, gather_rows
from thunder_memsave.sharding.sharded_parameter import (
    GradientRows,
    StateRows,
    is_sharded,
    mark_sharded,
)

Operation = Callable[[Tensor], Any]

WHOLE: dict[str, Operation] = {
    "sum": lambda w: w.sum(),
    "penalty": lambda w: w.pow(2).sum(),
    "doubled": lambda w: (w * 2).sum(),
    "mean": lambda w: w.mean(),
    "norm": lambda w: w.norm(),
    "linalg norm": lambda w: torch.linalg.norm(w, dim=0),
    "nuclear norm": lambda w: torch.linalg.matrix_norm(w, "nuc"),
    "std": lambda w: w.std(dim=0),
    "var": lambda w: torch.var(w),
    "max": lambda w: w.max(),
    "amin": lambda w: torch.amin(w, dim=0),
    "prod": lambda w: w.prod(dim=0),
    "logsumexp": lambda w: w.logsumexp(0),
    "softmax": lambda w: torch.softmax(w, 0),
    "cumsum": lambda w: torch.cumsum(w, 0),
    "sorted": lambda w: w.sort(dim=0).values,
    "topk": lambda w: w.flatten().topk(3).values,
    "median": lambda w: w.median(dim=0).values,
    "row": lambda w: w[3],
    "slice": lambda w: w[1:4],
    "columns": lambda w: w[:, 0],
    "index_select": lambda w: w.index_select(0, torch.tensor([4, 0])),
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "flatten": lambda w: w.flatten(),
    "transpose": lambda w: w.T,
    "gram": lambda w: w @ w.mT,
    "linear": lambda w: nn.functional.linear(torch.ones(2, 4), w),
    "fft": lambda w: torch.fft.rfft(w, dim=0).abs(),
    "singular values": lambda w: torch.linalg.svdvals(w),
    "mse": lambda w: nn.functional.mse_loss(w, torch.zeros(5, 4)),
    "cosine": lambda w: nn.functional.cosine_similarity(w[:1], w),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "unbound": lambda w: sum(row.square().sum() for row in w),
}
"""Operations whose result on some of the rows differs; all have a gradient."""

READ: dict[str, Operation] = {
    "any": lambda w: w.isnan().any(),
    "all": lambda w: bool(torch.isfinite(w).all()),
    "tolist": lambda w: w.tolist(),
    "equal": lambda w: torch.equal(w, w.detach()),
    "allclose": lambda w: torch.allclose(w, w),
    "histogram": lambda w: torch.histc(w.detach()),
    "positive": lambda w: torch.where(w.detach() > 0)[0],
    "largest": lambda w: w.detach().abs().max().item(),
    "count": lambda w: (w > 0).sum(),
    "copied": lambda w: w.detach().clone().double().sum(),
    "unique": lambda w: w.detach().round().unique(),
}
"""Reads that have no gradient."""

BY_ROWS: dict[str, Operation] = {
    "doubled": lambda w: w * 2,
    "from one": lambda w: 1 - w,
    "squared": lambda w: w**2,
    "clamped": lambda w: torch.clamp(w, max=0.1),
    "scaled columns": lambda w: w * torch.arange(4.0),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "signs": lambda w: w > 0,
    "halved": lambda w: w.to(torch.float64) / 2,
    "lerped": lambda w: torch.lerp(w, w * 3, 0.5),
    "foreach": lambda w: torch._foreach_mul([w, w], 3.0)[1],
}
"""Arithmetic in which each row is independent of the others."""


@dataclass
class Output:
    """An output like those of transformers, which `torch.utils._pytree` does not know."""

    loss: Tensor
    weights: dict[str, Tensor]


class Net(nn.Module):
    """Weights with odd numbers of rows: used, tied, frozen, and read only by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.tied = self.linear.weight
        self.unread = nn.Parameter(torch.randn(5, 4))
        self.frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Output:
        weights = {
            "used": self.linear.weight,
            "tied": self.tied,
            "unread": self.unread,
            "frozen": self.frozen,
            "bias": self.linear.bias,
            "view": self.linear.weight.view(-1),
            "detached": self.unread.detach(),
            "data": self.unread.data,
        }
        return Output(self.linear(x).square().mean(), weights)

    def only(self) -> Tensor:
        return self.unread

    def twice(self) -> tuple[Tensor, Tensor]:
        return self.unread, self.unread


def build() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_weights_that_leave_a_call_are_whole_and_rows_are_right_or_refused(tmp_path: Path) -> None:
    run_on_fabric_ranks(check, 2, tmp_path)


@on_fabric_rank
def check(directory: Path) -> None:
    for sharding in ("zero2", "zero3"):
        fabric = make_fabric(devices=2, sharding=sharding, timeout="2min")
        check_returned(fabric)
        check_penalties(fabric)
        check_outside(fabric)
        check_optimizers(fabric)
    check_averages(fabric)
    check_files(fabric, directory)


def check_returned(fabric: Fabric) -> None:
    reference, model = build(), fabric.setup(build())
    model.mark_forward_method("only")
    model.mark_forward_method("twice")
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            same_outputs(model(X), reference(X), enabled)
            assert torch.equal(model.only(), reference.only())
            first, second = model.twice()
            assert first is second
            assert torch.equal(first, reference.unread)


def same_outputs(ours: Output, expected: Output, enabled: bool) -> None:
    for name, value in ours.weights.items():
        assert not is_sharded(value), name
        assert torch.equal(value, expected.weights[name]), name
        assert value.requires_grad == (enabled and expected.weights[name].requires_grad), name


def check_penalties(fabric: Fabric) -> None:
    reference, model = build(), fabric.setup(build())
    for name, operation in WHOLE.items():
        for weight in ("used", "unread"):
            losses = []
            for net in (model, reference):
                net.zero_grad()
                output = net(X)
                losses.append(output.loss + operation(output.weights[weight]).square().sum())
            torch.testing.assert_close(losses[0], losses[1], msg=name)
            fabric.backward(losses[0])
            losses[1].backward()
            same_gradients(fabric, model, reference, name)
    weights = model(X).weights, reference(X).weights
    for name, operation in READ.items():
        torch.testing.assert_close(
            operation(weights[0]["tied"]), operation(weights[1]["tied"]), msg=name
        )


def same_gradients(fabric: Fabric, model: nn.Module, reference: nn.Module, name: str) -> None:
    data_parallel = fabric.strategy.data_parallel  # type: ignore[attr-defined]
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None), name
        if p.grad is not None and expected.grad is not None:
            whole = gather_rows(p.grad, p.unsharded_shape, data_parallel)  # type: ignore[attr-defined]
            torch.testing.assert_close(whole, expected.grad, msg=name)


def check_outside(fabric: Fabric) -> None:
    model, reference = fabric.setup(build()), build()
    data_parallel = fabric.strategy.data_parallel  # type: ignore[attr-defined]
    p, whole = model.module.linear.weight, reference.linear.weight.detach()
    for name, operation in {**WHOLE, **READ}.items():
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled), refuses(name):
                operation(p)
    for name, operation in BY_ROWS.items():
        with torch.no_grad():
            result = operation(p)
        torch.testing.assert_close(
            gather_rows(result.data, whole.shape, data_parallel), operation(whole), msg=name
        )
        with refuses(name):
            result.sum()
    with pytest.raises(ShardedParameterError, match=r"fabric.all_reduce\(\) was asked .*\(5, 4\)"):
        fabric.all_reduce(p)


def refuses(name: str) -> Any:
    text = r"was asked to use 'tied' of shape \(5, 4\).*of its 5 rows.*summon_full\(module\)"
    assert name
    return pytest.raises(ShardedParameterError, match=text)


def check_optimizers(fabric: Fabric) -> None:
    """Optimizers stepped by hand, without the strategy, work too; no state refuses to be saved."""
    kinds: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.Adamax, {}),
        (torch.optim.RAdam, {"foreach": True}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ]
    for kind, options in kinds:
        reference, model = build(), fabric.setup_module(build())
        optimizers = [
            kind(net.parameters(), lr=0.1, weight_decay=0.01, **options)  # type: ignore[call-arg]
            for net in (model, reference)
        ]
        for _ in range(2):
            for net, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                output = net(X)
                (output.loss + output.weights["unread"].norm()).backward()
                optimizer.step()
        same_weights(fabric, model, reference)
        state = [
            v for s in optimizers[0].state.values() for v in s.values() if isinstance(v, Tensor)
        ]
        assert state
        # SGD's momentum is a copy of the first gradient.
        assert {type(v) for v in state} == {GradientRows if kind is torch.optim.SGD else Tensor}
        torch.save(optimizers[0].state_dict(), io.BytesIO())


def same_weights(fabric: Fabric, model: nn.Module, reference: nn.Module) -> None:
    data_parallel = fabric.strategy.data_parallel  # type: ignore[attr-defined]
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(gather_full(p, data_parallel), expected.detach())


def check_averages(fabric: Fabric) -> None:
    reference, model = build(), fabric.setup(build())
    ours, theirs = (
        AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for net in (model.module, reference)
    )
    by_hand = [(p.detach().clone(), q.detach().clone()) for p, q in pairs(model, reference)]
    for _ in range(2):
        with torch.no_grad():
            for (p, q), (ema, expected) in zip(pairs(model, reference), by_hand, strict=True):
                p.mul_(1.5)
                q.mul_(1.5)
                ema.lerp_(p, 0.1)
                expected.lerp_(q, 0.1)
        ours.update_parameters(model.module)
        theirs.update_parameters(reference)
    same_weights(fabric, ours.module, theirs.module)
    data_parallel = fabric.strategy.data_parallel  # type: ignore[attr-defined]
    for ema, expected in by_hand:
        torch.testing.assert_close(gather_rows(ema.data, expected.shape, data_parallel), expected)


def pairs(model: nn.Module, reference: nn.Module) -> Any:
    return zip(model.parameters(), reference.parameters(), strict=True)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: Any = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "vocab_size": 31,
        "num_hidden_layers": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def check_files(fabric: Fabric, directory: Path) -> None:
    expected, model = llama().state_dict(), fabric.setup(llama())
    own = directory / str(fabric.global_rank)
    own.mkdir()
    refused = pytest.raises(
        ShardedParameterError,
        match=r"Refused to write rows of '\S+' of shape .* as if they were all of it; this rank holds .*"
        r"strategy.summon_full\(module\).*strategy.get_module_state_dict\(module\).*"
        r"value.full_tensor",
    )
    with refused:
        model.module.save_pretrained(own / "out")
    assert not list(own.rglob("*.safetensors"))
    with refused:
        save_file(model.module.state_dict(), own / "rows.safetensors")
    with refused:
        save_file({n: t.half().contiguous() for n, t in model.state_dict().items()}, own / "rows")
    with refused:
        save_file({n: p.detach() for n, p in model.named_parameters()}, own / "rows")
    with refused:
        torch.save(model.module.state_dict(), io.BytesIO())
    with refused:
        torch.save({n: p.detach().cpu() for n, p in model.named_parameters()}, io.BytesIO())
    assert not list(own.glob("rows*"))
    fabric.save(directory / "saved", {"model": model, "weights": model.state_dict()})
    weights = fabric.load(directory / "saved", {"model": model})["weights"]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    with fabric.strategy.summon_full(model):  # type: ignore[attr-defined]
        model.module.save_pretrained(own / "out")
        save_file(model.module.state_dict(), own / "whole.safetensors")
    paths = [own / "whole.safetensors"]
    if fabric.global_rank == 0:  # the only one on which transformers writes
        paths.append(own / "out" / "model.safetensors")
    for path in paths:
        for name, value in load_file(path).items():
            assert torch.equal(value, expected[name]), (path, name)
    check_state(fabric, model, expected)


def check_state(fabric: Fabric, model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Readers of a state dict's values get this rank's rows, as docs/strategy.md says."""
    state = copy.deepcopy(model.state_dict())
    for name, value in state.items():
        num_rows = -(-expected[name].shape[0] // 2)
        rows = expected[name].split(num_rows)[fabric.global_rank]
        assert torch.equal(value, rows), name
        assert type(value.data) is Tensor
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    assert torch.equal(model.state_dict()["model.norm.weight"], state["model.norm.weight"] + 1)
    buffer = io.BytesIO()
    torch.save(
        {name: value.data for name, value in state.items()}, buffer
    )  # these rows, by request


def rows_of(whole: Tensor) -> nn.Parameter:
    return mark_sharded(
        nn.Parameter(whole[:2].clone()),
        unsharded_shape=whole.shape,
        first_row=0,
        num_real_rows=2,
        parameter_name="w",
    )


def test_a_penalty_on_rows_says_where_it_belongs() -> None:
    p = rows_of(torch.ones(4, 3))
    with pytest.raises(
        ShardedParameterError, match=r"pow\(\).*compute a penalty in the module's forward"
    ):
        (p**2).sum().backward()
    with pytest.raises(ShardedParameterError, match=r"add_\(\).*torch.no_grad\(\)"):
        torch.zeros(2, 3).add_(p)


def test_rows_of_two_weights_are_not_mixed() -> None:
    p, other = rows_of(torch.ones(4, 3)), rows_of(torch.ones(3, 3))
    with torch.no_grad(), pytest.raises(ShardedParameterError, match=r"'w' of shape \(4, 3\)"):
        p + other


def test_gradients_of_rows_are_asked_for_by_autograd_grad() -> None:
    p = rows_of(torch.ones(4, 3))
    loss = (p.data.requires_grad_() * 3).sum()
    (unrelated,) = torch.autograd.grad(loss, [p], allow_unused=True)
    assert unrelated is None
    with pytest.raises(ShardedParameterError, match=r"grad\(\) was asked"):
        torch.autograd.grad(p.clone(), [p], torch.ones(2, 3))


def test_data_is_the_one_way_around() -> None:
    p = rows_of(torch.ones(4, 3))
    assert type(p.data) is Tensor
    assert type(p.detach().data) is Tensor
    assert p.data.sum() == 6
    with torch.no_grad():
        p.add_(torch.ones(2, 3))
    assert p.data.sum() == 12


def test_what_is_made_of_a_state_dicts_values_gets_into_no_file_either() -> None:
    module = nn.Linear(3, 4, bias=False)
    module.weight = rows_of(module.weight.detach())
    hide_padding(module)
    value = module.state_dict()["weight"]
    assert type(value) is StateRows
    for made in (
        value,
        value.half(),
        value.T.contiguous(),
        torch.cat([value, value]),
        value * 1,
        *value.chunk(2),
    ):
        with pytest.raises(ShardedParameterError, match="Refused to write rows of 'w'"):
            torch.save(made, io.BytesIO())
        with pytest.raises(ShardedParameterError, match="Refused to write rows of 'w'"):
            made.untyped_storage()
    assert value.sum().item() == value.data.sum().item()
