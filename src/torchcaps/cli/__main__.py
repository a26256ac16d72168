"""`python -m torchcaps.cli`."""

from torchcaps.cli import main

main()
