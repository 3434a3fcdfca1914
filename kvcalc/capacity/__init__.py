"""What fits on GPUs: a budget for the cache (`memory_terms`), and what an engine makes of it
(`engines`). Two steps, apart."""

from kvcalc.capacity.deployment_fit import Fit, fit
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.capacity.memory_budget import Budget, budget

__all__ = ["Budget", "Fit", "FitOptions", "budget", "fit"]
