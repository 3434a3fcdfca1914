"""`python -m kvcalc`."""

from kvcalc.cli.app import main

main()
