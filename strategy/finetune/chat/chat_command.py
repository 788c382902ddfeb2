"""The command `thunder-memsave chat`: loads what a run trained, and converses."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from thunder_memsave.finetune.chat.options import ChatOptions
from thunder_memsave.finetune.chat.run_path import require_directory


def run_chat(options: ChatOptions) -> int:
    """Load what the run trained, and answer until the user ends it.

    Raises:
        ConfigError: the run or its base model cannot be used.
    """
    if options.address is None:
        require_directory(options.run)
    if options.prompt is None and sys.stderr.isatty():
        print(f"loading {options.address or options.run} ...", file=sys.stderr, flush=True)
    # These imports take seconds; mistakes in the arguments are found first.
    from transformers.utils import logging

    from thunder_memsave.finetune.chat.answering import load_answering
    from thunder_memsave.finetune.chat.conversation import converse
    from thunder_memsave.finetune.chat.find_weights import find_weights
    from thunder_memsave.finetune.output.fetched import fetch_run

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its advice is about arguments that are not the user's here
    with tempfile.TemporaryDirectory(prefix="thunder_memsave-chat-") as directory:
        run = options.run
        if options.address is not None:
            run = fetch_run(options.address, Path(directory) / "run")
        found = find_weights(run, Path(directory), base=options.base)
        answering = load_answering(found, options)
    converse(answering, options)
    return 0
