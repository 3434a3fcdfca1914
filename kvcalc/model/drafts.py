"""Requirements of draft models."""

from kvcalc.errors import UserError
from kvcalc.model.spec import Model

PADDING = 128  # entries by which vocabularies may differ (llama.cpp, common/speculative.cpp: SPEC_VOCAB_MAX_SIZE_DIFFERENCE)


def check_vocabulary(target: Model, draft: Model, most: int = PADDING, engine: str = "") -> None:
    """Raise UserError if a draft's vocabulary differs from the target's by more than `most` padding entries.

    Only sizes are compared. A draft that uses its target's embedding maps its own vocabulary. `engine` is
    the engine whose limit applies.
    """
    if draft.lent or abs(target.vocab_size - draft.vocab_size) <= most:
        return
    why = f"{engine} drafts with the model's own vocabulary alone" if engine else "a draft proposes the model's own tokens"
    sizes = f"{draft.name}'s has {draft.vocab_size:,} entries, {target.name}'s {target.vocab_size:,}"
    raise UserError(f"{why}, and {sizes}", hint="Draft with a smaller model of its family")
