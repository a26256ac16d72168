"""Runs the command line with ``python -m torchcaps``."""

from torchcaps.cli import main

if __name__ == "__main__":
    main()
