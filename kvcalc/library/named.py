"""Load models by name; if the Hub refuses a model, the error names the equivalent preset."""

from kvcalc.errors import UserError
from kvcalc.library.load import hub_name, load_model
from kvcalc.model.spec import Model


def load_named(name: str, changes: list[str] | None = None) -> Model:
    """Return the model, as `load_model` does.

    If the Hub does not provide the model but an equivalent preset exists, the error names it.
    """
    try:
        return load_model(name, changes)
    except UserError as error:
        same = _preset(name) if " Hub" in error.what else ""
        if not same:
            raise
        hint = f"{error.hint}{'' if error.hint.endswith('?') else '.'} The preset {same} needs no network"
        raise UserError(error.what, error.where, hint) from None


def _preset(name: str) -> str:
    """Return the preset that a Hub name means and its weight format; '' if it is unknown."""
    from kvcalc.library.checkpoints import checkpoint

    try:
        found = checkpoint(hub_name(name))
    except UserError:
        return ""
    stored = f" with --quantization {found.quantization}" if found.quantization else ""
    return "" if "/" in found.name else f"{found.name}{stored}"
