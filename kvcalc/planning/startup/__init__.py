"""Start-up logs of engines, read: what each boot in them said of its model, its GPU, its flags and its memory."""

from kvcalc.planning.startup.boot import Boot, Failure
from kvcalc.planning.startup.reader import read_boots

__all__ = ["Boot", "Failure", "read_boots"]
