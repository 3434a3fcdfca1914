"""The real layers on the machine at hand, against the prediction. The only room with torch, which is an extra."""

from importlib.util import find_spec

from kvcalc.errors import UserError


def require_torch() -> None:
    """Raises UserError naming the extra where torch is not installed."""
    if find_spec("torch") is None:
        raise UserError("`kvcalc measure` runs torch, which is not installed", hint="Run pip install 'kvcalc[measure]'")
