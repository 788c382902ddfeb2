"""Trains every causal language model of transformers at toy size, beside eager, and writes what becomes of each.

    make architectures                                   # all, about half an hour on 2 cores
    python benchmarks/architectures.py --only llama gpt2 --save architectures.md

Each entry of transformers' mapping of causal models is made small by the names of its sizes, without dropout, and
trained for one step by eager PyTorch and by the strategy: the loss and every gradient must agree. Each is a process of
its own with a limit of time and memory, so that one that hangs or crashes says so and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import site
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.strategy import ThunderMemsaveStrategy

ROOT = Path(__file__).parents[1]
LIMIT_S = 240.0
MEMORY_BYTES = 10 * 2**30
MOST_PARAMETERS = 30_000_000
CLOSE = 1e-5
"""Largest difference of a loss or gradient, as a part of the largest number of that tensor."""
VOCABULARY, ROWS, LENGTH = 96, 2, 16

# Sizes by the names that transformers' configurations have for them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), 0),
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "attn_config.kv_n_heads": 2,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one architecture."""

    name: str
    state: str
    """`trains`, `differs`, `refused`, `fails`, `hangs`; or `not here`: eager itself does not train it so."""
    reason: str = ""
    seconds: float = 0.0
    difference: float | None = None
    """The largest one, as `CLOSE` counts."""


class NotHereError(Exception):
    """Eager does not train the model at this size; the message says why."""


def outcome_of(name: str) -> Outcome:
    """Train one architecture in this process."""
    start = time.monotonic()

    def ended(state: str, reason: object = "", difference: float | None = None) -> Outcome:
        seconds = round(time.monotonic() - start, 1)
        line = _without_directories(" ".join(str(reason).split()))[:400]
        return Outcome(name=name, state=state, reason=line, seconds=seconds, difference=difference)

    try:
        model, batch = toy(name)
        expected = stepped(model, batch)
    except Exception as error:
        return ended("not here", f"{type(error).__name__}: {error}")
    try:
        found = stepped(model, batch, strategy=ThunderMemsaveStrategy())
    except ThunderMemsaveError as error:
        return ended("refused", error)
    except Exception as error:
        traceback.print_exc()
        return ended("fails", f"{type(error).__name__}: {error}")
    worst, where = largest_difference(expected, found)
    if worst > CLOSE:
        return ended("differs", f"{where} by {worst:.1e}", worst)
    return ended("trains", difference=worst)


def _without_directories(text: str) -> str:
    """Leave out where packages and this checkout are: results say nothing of the machine."""
    for directory in (*site.getsitepackages(), ROOT):
        text = text.replace(f"{directory}/", "")
    return text


def toy(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Make a small model of an architecture, and a batch.

    Raises:
        NotHereError: its parts stay large.
    """
    config = transformers.AutoConfig.for_model(name)
    shrink(config)
    kind = type(config)
    fixed = {k for k in dir(kind) if isinstance(p := getattr(kind, k), property) and p.fset is None}
    values = config.to_dict()
    config = kind(**{k: v for k, v in values.items() if k != "model_type" and k not in fixed})
    torch.manual_seed(0)
    with torch.device("meta"):
        num_parameters = sum(
            p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters()
        )
    if num_parameters > MOST_PARAMETERS:
        raise NotHereError(f"it still has {num_parameters:,} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train().float()
    ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH))
    return model, {"input_ids": ids, "labels": ids}


def shrink(config: Any) -> None:
    """Make a configuration and those within it small, and switch dropout off."""
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)
        elif key in SIZES and (value is None or isinstance(value, int)):
            if value is not None:
                setattr(config, key, SIZES[key])
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            setattr(config, key, 0.0)
        elif key == "layer_types" and isinstance(value, list):
            setattr(config, key, list(dict.fromkeys(value))[:2] * 2 if value else value)
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := vars(config).get(key), list):
            setattr(config, key, kinds[: getattr(config, "num_hidden_layers", 2)])
    config.use_cache = False


def stepped(
    model: nn.Module, batch: dict[str, Tensor], *, strategy: Any = None
) -> dict[str, Tensor]:
    """Return the loss and all gradients of one step; the model is left without gradients."""
    torch.manual_seed(1)
    called: Any = model
    if strategy is not None:
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        called = fabric.setup(model)
    loss = called(**batch).loss
    loss.backward()
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"the loss": loss.detach(), **found}


def largest_difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference and its tensor; infinite for one that is missing or not finite."""
    if missing := sorted(expected.keys() ^ found.keys()):
        return float("inf"), f"the gradient of {missing[0]} is there on one side only"
    pairs = ((relative(a, found[n]), n) for n, a in expected.items())
    return max(pairs, default=(0.0, ""))


def relative(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference as a part of the largest expected number; tiny gradients count as 1e-6."""
    largest = max(float(expected.abs().max()), 1e-6) if expected.numel() else 1.0
    difference = float((expected - found).abs().max()) if expected.numel() else 0.0
    return difference / largest if difference == difference else float("inf")


def run_apart(name: str) -> tuple[int, int]:
    """Start a process for one architecture; return its id and the pipe that its outcome comes through."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(asdict(outcome_of(name))))
        os._exit(0)
    os.close(write)
    return pid, read


def outcomes(names: Sequence[str], *, workers: int) -> Iterator[Outcome]:
    """Yield the outcome of each architecture, as they end."""
    waiting = list(names)
    running: dict[int, tuple[str, int, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            pid, pipe = run_apart(name)
            running[pipe] = (name, pid, time.monotonic())
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for pipe, (name, pid, start) in list(running.items()):
            is_late = time.monotonic() - start > LIMIT_S
            if pipe not in ready and not is_late:
                continue
            if is_late and pipe not in ready:
                os.killpg(pid, signal.SIGKILL)
            text = os.fdopen(pipe).read()
            _, status = os.waitpid(pid, 0)
            del running[pipe]
            yield outcome_from(
                name, text, status, is_late=is_late, seconds=time.monotonic() - start
            )


def outcome_from(name: str, text: str, status: int, *, is_late: bool, seconds: float) -> Outcome:
    """Return what a process wrote, or how it ended without."""
    if text:
        return Outcome(**json.loads(text))
    if is_late:
        return Outcome(name=name, state="hangs", reason=f"it had not ended after {LIMIT_S:.0f} s")
    reason = f"its process ended with {os.waitstatus_to_exitcode(status)}"
    return Outcome(name=name, state="fails", reason=reason, seconds=round(seconds, 1))


def table(found: Sequence[Outcome]) -> str:
    """Return the Markdown: what trains in one line, and a row for each other with its reason."""
    counts = Counter(o.state for o in found)
    trained = len(found) - counts["not here"]
    packages = ", ".join(
        f"{p} {version(p)}" for p in ("torch", "transformers", "lightning-thunder")
    )
    lines = [
        f"{counts['trains']} of the {trained} causal language models that eager trains at this size train, with "
        f"eager's loss and gradients to {CLOSE:.0e} of the largest number; {counts['not here']} others of "
        f"transformers' mapping eager does not train so. {packages}, CPU.",
        "",
        "**Train:** " + ", ".join(sorted(o.name for o in found if o.state == "trains")) + ".",
        "",
        "| model | | reason |",
        "|---|---|---|",
    ]
    order = ("differs", "fails", "hangs", "refused", "not here")
    for state in order:
        for o in sorted((o for o in found if o.state == state), key=lambda o: o.name):
            lines.append(f"| {o.name} | {state} | {o.reason.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", help="names of architectures; all by default")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side")
    parser.add_argument(
        "--save", type=Path, help="a Markdown file; a JSON file is written beside it"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.only or ()) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    if unknown:
        print(f"transformers has no causal model {', '.join(unknown)}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = arguments.only or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = []
    for outcome in outcomes(names, workers=arguments.workers):
        found.append(outcome)
        print(f"[{len(found)}/{len(names)}] {outcome.name}: {outcome.state} {outcome.reason[:150]}")
        sys.stdout.flush()
    if arguments.save is not None:
        arguments.save.write_text(table(found))
        arguments.save.with_suffix(".json").write_text(
            json.dumps([asdict(o) for o in sorted(found, key=lambda o: o.name)], indent=1)
        )
    counts = Counter(o.state for o in found)
    print(", ".join(f"{n} {state}" for state, n in counts.most_common()))
    return int(any(o.state in ("differs", "fails", "hangs") for o in found))


if __name__ == "__main__":
    sys.exit(main())
