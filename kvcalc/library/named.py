"""Models by name as people give them: where the Hub does not hand one out, the preset that stands for it is named."""

from kvcalc.errors import UserError
from kvcalc.library.load import hub_name, load_model
from kvcalc.model.spec import Model


def load_named(name: str, changes: list[str] | None = None) -> Model:
    """As `load_model`; where the Hub does not give a model that a preset stands for, the error names that too."""
    try:
        return load_model(name, changes)
    except UserError as error:
        same = _preset(name) if " Hub" in error.what else ""
        if not same:
            raise
        hint = f"{error.hint}{'' if error.hint.endswith('?') else '.'} The preset {same} needs no network"
        raise UserError(error.what, error.where, hint) from None


def _preset(name: str) -> str:
    """The preset that a name on the Hub stands for, and how it stores its weights; '' where nothing is known of it."""
    from kvcalc.library.checkpoints import checkpoint

    try:
        found = checkpoint(hub_name(name))
    except UserError:
        return ""
    stored = f" with --quantization {found.quantization}" if found.quantization else ""
    return "" if "/" in found.name else f"{found.name}{stored}"
