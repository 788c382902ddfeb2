"""Runs `plan --search`: plans what may be worth running, and shows and writes what was found."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection
from pathlib import Path

from thunder_memsave.errors import DOES_NOT_FIT
from thunder_memsave.finetune.model.build import describe_model
from thunder_memsave.finetune.plan.few_layers import has_many_layers
from thunder_memsave.finetune.plan.other_formats import HeldBytes, with_values
from thunder_memsave.finetune.plan.plan_run import budget_of
from thunder_memsave.finetune.plan.search.asked import Judges
from thunder_memsave.finetune.plan.search.axes import Setting, settings_of
from thunder_memsave.finetune.plan.search.best_file import write_best
from thunder_memsave.finetune.plan.search.options import SearchOptions
from thunder_memsave.finetune.plan.search.planning import Planning, num_processes
from thunder_memsave.finetune.plan.search.search import Search
from thunder_memsave.finetune.plan.search.table import search_json, search_table
from thunder_memsave.finetune.run_file.batch_sizes import batch_sizes
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.launch import world_size
from thunder_memsave.finetune.run_file.reading.parse import RunFile


@dataclasses.dataclass(frozen=True, slots=True)
class SearchRun:
    """A search of one run file."""

    run_file: RunFile
    options: SearchOptions
    search: Search
    num_ranks: tuple[int, ...]
    planning: Planning

    @classmethod
    def of(cls, run_file: RunFile, options: SearchOptions) -> SearchRun:
        """Prepare a search."""
        config = _without_auto(run_file.config, options.axes)
        num_ranks = options.num_ranks or (world_size(config),)
        num_at_once = num_processes()
        planning = Planning(config, num_at_once)
        search = Search(
            config=config,
            axes=options.axes,
            in_all=batch_sizes(config.train, world_size=num_ranks[0]).global_batch_size,
            judges=_judges(config, planning),
            num_at_once=num_at_once,
            estimates=has_many_layers(describe_model(config)),
            say=_say,
            shows_devices=len(options.devices) > 1,
            shows_ranks=len(num_ranks) > 1,
        )
        return cls(run_file, options, search, num_ranks, planning)

    def run(self) -> None:
        """Plan; minutes for each plan of a large model."""
        options = self.options
        settings = settings_of(
            self.search.config,
            axes=options.axes,
            num_ranks=self.num_ranks,
            devices=options.devices,
        )
        try:
            self.search.run(settings)
        finally:
            self.planning.end()

    def interrupted(self) -> str:
        """End the plans that are being made, and return the table of what was found so far."""
        self.planning.kill()
        return self.shown()

    def shown(self) -> str:
        """Return the table of what was found so far."""
        return search_table(self.search, num_tokens=self._num_tokens, price=self.options.price)

    def report(self, json_path: Path | None) -> int:
        """Print the table, write what was asked for, and return the exit code: 3 if nothing fits."""
        print(self.shown())
        if json_path is not None:
            found = search_json(self.search, num_tokens=self._num_tokens, price=self.options.price)
            json_path.write_text(f"{json.dumps(found, indent=2)}\n", encoding="utf-8")
        ranked, path = self.search.ranked, self.options.write
        if not ranked:
            return DOES_NOT_FIT
        if path is not None:
            write_best(path, ranked[0], self.run_file, sets_ranks=self.search.shows_ranks)
            print(f"the first is in {path}.")
        return 0

    @property
    def _num_tokens(self) -> int | None:
        """Tokens of the whole run; None: how many rows its data has is not known here."""
        config = self.run_file.config
        if config.train.max_steps is None or "max_seq_length" in self.options.axes:
            return None
        return config.train.max_steps * self.search.in_all * config.data.max_seq_length


def _without_auto(config: RunConfig, axes: Collection[str]) -> RunConfig:
    """Return the run with nothing on the host, where that is searched: a plan that does not fit shall not try it."""
    if "offload" not in axes or not config.memory.may_offload:
        return config
    return with_values(config, {"memory.offload": "none"})


def _judges(config: RunConfig, planning: Planning) -> Judges:
    held = {"cpu": HeldBytes("cpu"), "cuda": HeldBytes("cuda")}

    def held_bytes(setting: Setting) -> int:
        of_type = held["cpu" if setting.device.name == "cpu" else "cuda"]
        run = with_values(config, setting.values)
        return of_type.of(run, setting.form.weights, num_ranks=setting.num_ranks)

    def budget_bytes(setting: Setting) -> int | None:
        return budget_of(with_values(config, setting.values).of_strategy, setting.device)

    return Judges(
        begin=planning.begin,
        ended=planning.ended,
        held_bytes=held_bytes,
        budget_bytes=budget_bytes,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
