"""Capacity of GPUs: a KV cache budget (`memory_budget`), and its layout by engine (`engines`)."""

from kvcalc.capacity.deployment_fit import Fit, fit
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.capacity.memory_budget import Budget, budget

__all__ = ["Budget", "Fit", "FitOptions", "budget", "fit"]
