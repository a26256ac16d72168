"""Run the command line with `python -m torchcaps.cli`."""

from torchcaps.cli import main

main()
