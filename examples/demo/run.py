"""Makes a small language model, fine-tunes it with LoRA on two processes, and checks the result.

    python examples/demo/run.py

Everything is written to runs/demo. The exit code is 0 only if the validation loss went down clearly
and the adapter gives that very loss in plain transformers and peft.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dataset import is_answerable, question, write_questions, write_texts
from docstrings import Docstring, standard_library_docstrings
from plain import PlainModel
from tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path("runs/demo")

_VOCAB_SIZE = 4096
_NUM_PROCESSES = 2
_CLEARLY_LOWER = 0.9
# The other code adds up float32 numbers in another order.
_SAME_LOSS = 1e-4


def main() -> int:
    """Run the demo from beginning to end; returns the exit code."""
    os.chdir(ROOT)
    start = time.perf_counter()
    shutil.rmtree(DEMO, ignore_errors=True)
    docstrings = _make_data()
    _headline("2/5  Pre-training a model of 2.4 million parameters, from random weights")
    _train("configs/demo_pretrain.yaml")
    _headline("3/5  Fine-tuning it with LoRA on two processes")
    _train("configs/demo_lora.yaml")
    _headline("4/5  One answer before and after, in plain transformers and peft")
    plain = PlainModel(model=DEMO / "pretrain/model", adapter=DEMO / "lora/adapter")
    _show_answers(plain, docstrings)
    _headline("5/5  Checks")
    passed = _check(plain)
    _say_where_everything_is()
    print(f"\n{'The demo passed' if passed else 'THE DEMO FAILED'}", end=" ")
    print(f"after {time.perf_counter() - start:.0f} seconds.")
    return 0 if passed else 1


def _make_data() -> list[Docstring]:
    _headline("1/5  Reading the standard library's documentation, training a tokenizer")
    docstrings = standard_library_docstrings()
    write_texts(docstrings, DEMO / "data")
    write_questions(docstrings, DEMO / "data")
    seen = [doc.text for doc in docstrings if not doc.held_out]
    train_tokenizer(seen, DEMO / "tokenizer", vocab_size=_VOCAB_SIZE)
    num_characters = sum(map(len, seen))
    print(f"{len(docstrings):,} docstrings, {num_characters:,} characters to train on")
    return docstrings


def _train(config: str) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_NUM_PROCESSES}"]
    command = [*launch, "-m", "thunder_memsave", "train", config]
    print("$ python", *command, flush=True)
    # One thread per process: two processes share the cores, and two cores are enough.
    environment = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 2) // _NUM_PROCESSES, 1))}
    subprocess.run([sys.executable, *command], env={**os.environ, **environment}, check=True)


def _show_answers(plain: PlainModel, docstrings: list[Docstring]) -> None:
    held_out = (doc for doc in docstrings if doc.held_out and doc.kind == "function")
    asked = next(doc for doc in held_out if is_answerable(doc))
    print(f"Question:       {question(asked)}")
    print(f"Documentation:  {asked.summary}")
    print(f"Before:         {plain.answer(question(asked), with_adapter=False)!r}")
    print(f"After:          {plain.answer(question(asked), with_adapter=True)!r}")
    print("(A model this small learns what an answer looks like, not what is true.)")


def _check(plain: PlainModel) -> bool:
    losses = _validation_losses(DEMO / "lora/metrics.csv")
    before, after = losses[0], losses[-1]
    loaded = plain.validation_loss(DEMO / "data/questions_val.jsonl")
    print(f"validation loss before: {before:.4f}")
    print(f"validation loss after:  {after:.4f}")
    print(f"the same in plain transformers + peft, from the saved adapter: {loaded:.4f}")
    return after < _CLEARLY_LOWER * before and math.isclose(loaded, after, rel_tol=_SAME_LOSS)


def _validation_losses(path: Path) -> list[float]:
    with path.open(encoding="utf-8", newline="") as file:
        return [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]


def _say_where_everything_is() -> None:
    print("\nadapter   runs/demo/lora/adapter        (PeftModel.from_pretrained loads it)")
    print("model     runs/demo/pretrain/model      (AutoModelForCausalLM.from_pretrained)")
    print("metrics   runs/demo/lora/metrics.csv, and as a picture loss.png beside it")
    print("configs   configs/demo_pretrain.yaml, configs/demo_lora.yaml")
    print("data      runs/demo/data")


def _headline(text: str) -> None:
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
