"""Measures a process's peak memory with data that streams and data that is held, by the size of the file.

    PYTHONPATH=.typing:tests python benchmarks/streamed_memory.py [--streamed 10MB 2GB] [--held 10MB 100MB]

Each file is JSONL of texts of 40 to 400 random words. Each measurement is a process of its own, which reads the file
through `prepare_data` into packed rows of 1,024 tokens, with a tokenizer of whole words, and lays out 300 batches of
16 rows, 100 in each of three epochs. `first` has an empty cache, `again` the tokens of `first`. Peak: `VmHWM`, which
counts everything that was resident, libraries and pages of mapped files too. The file is deleted after its measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from harness.language_model import WORDS
from thunder_memsave.finetune.data.batches import (
    Sharding,
    make_batch,
    num_steps_per_epoch,
    step_rows,
)
from thunder_memsave.finetune.data.prepare import prepare_data
from thunder_memsave.finetune.run_file.config import DataConfig, ModelConfig, RunConfig

_UNITS = {"MB": 10**6, "GB": 10**9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streamed", nargs="*", default=["10MB", "2GB"])
    parser.add_argument("--held", nargs="*", default=["10MB", "100MB"])
    parser.add_argument("--measure", nargs=3, metavar=("FILE", "TOKENIZER", "HOW"))
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(*options.measure)))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_word_tokenizer(directory / "tokenizer")
        print(
            f"{'file':>6}  {'':8}  {'rows':>9}  {'prepared s':>10}  {'batch ms':>8}  {'peak MB':>7}"
        )
        for size, how in [(size, "held") for size in options.held]:
            report(directory, size, how, [how])
        for size in options.streamed:
            report(directory, size, "streamed", ["first", "again"])


def report(directory: Path, size: str, how: str, starts: list[str]) -> None:
    """Write a file, measure it, and print a line for each start."""
    path = directory / f"{size}.jsonl"
    write_file(path, int(float(size[:-2]) * _UNITS[size[-2:]]))
    cache = {"THUNDER_MEMSAVE_CACHE": str(directory / "cache")}
    for start in starts:
        command = [sys.executable, "-W", "ignore", __file__, "--measure", path]
        found = subprocess.run(
            [*map(str, command), str(directory / "tokenizer"), how],
            env={**os.environ, **cache},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = json.loads(found.stdout.splitlines()[-1])
        print(
            f"{size:>6}  {start:8}  {line['num_rows']:9,}  {line['prepared_s']:10.1f}  {line['batch_ms']:8.1f}  "
            f"{line['peak_bytes'] / 10**6:7.1f}",
            flush=True,
        )
    path.unlink()


def write_word_tokenizer(directory: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(("<pad>", "<end>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.save_pretrained(directory)


def write_file(path: Path, num_bytes: int) -> None:
    chance = random.Random(0)
    with path.open("w") as file:
        while file.tell() < num_bytes:
            for _ in range(1000):
                text = " ".join(chance.choices(WORDS, k=chance.randint(40, 400)))
                file.write(json.dumps({"text": text}) + "\n")


def measured(path: str, tokenizer: str, how: str) -> dict[str, Any]:
    """Prepare a file's rows, lay out batches of them, and return times and the process's peak."""
    arguments = {"path": path, "streaming": how == "streamed", "val_fraction": 0.01}
    config = RunConfig(
        model=ModelConfig(name_or_path=tokenizer),
        data=DataConfig(
            dataset={"class_path": "DataFiles", "init_args": arguments}, max_seq_length=1024
        ),
    )
    start = time.perf_counter()
    data = prepare_data(config, AutoTokenizer.from_pretrained(tokenizer))
    prepared = time.perf_counter()
    sharding = Sharding(global_batch_size=16, micro_batch_size=16)
    per_epoch = num_steps_per_epoch(len(data.train), sharding)
    num_batches = 0
    for epoch in range(3):
        for step in range(epoch * per_epoch, epoch * per_epoch + min(100, per_epoch)):
            for chosen in step_rows(len(data.train), sharding, seed=0, step=step, order=data.order):
                make_batch(data.train, chosen)
                num_batches += 1
    return {
        "num_rows": len(data.train),
        "prepared_s": prepared - start,
        "batch_ms": 1000 * (time.perf_counter() - prepared) / num_batches,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
