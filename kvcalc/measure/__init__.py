"""Run torch layers on this machine and compare their times with the prediction.

Only this package imports torch, which is an optional dependency.
"""

from importlib.util import find_spec

from kvcalc.errors import UserError


def require_torch() -> None:
    """Raise UserError with the command to type if torch is not installed."""
    if find_spec("torch") is None:
        raise UserError(
            "`kvcalc measure` runs torch, which is not installed",
            "Run pip install 'kvcalc[measure]'",
        )
