"""Lets `python -m thunder_memsave` do what the command `thunder-memsave` does."""

import sys

from thunder_memsave.finetune.cli import main

if __name__ == "__main__":
    sys.exit(main())
