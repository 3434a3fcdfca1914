"""What fits on GPUs: a budget for the cache (`memory_terms`), and what an engine makes of it (`engines`). Two steps, apart."""

from kvcalc.capacity.answer import Fit, fit
from kvcalc.capacity.memory_terms import Budget, budget
from kvcalc.capacity.options import FitOptions

__all__ = ["Budget", "Fit", "FitOptions", "budget", "fit"]
