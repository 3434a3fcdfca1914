"""Run torch layers on this machine and compare their times with the prediction.

Only this package imports torch, which is an optional dependency.
"""

from importlib.util import find_spec

from kvcalc.errors import UserError


def require_torch() -> None:
    """Check that torch is installed.

    Raises:
        UserError: torch is not installed. The message has the command that installs it.
    """
    if find_spec("torch") is None:
        raise UserError(
            "`kvcalc measure` runs torch, which is not installed",
            "Run pip install 'kvcalc[measure]'",
        )
