"""Models' names, or an engine's command line in their place: what it says of the options of a command."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvcalc.cli.chosen import chosen_models, model_words
from kvcalc.cli.common import note
from kvcalc.cli.groups import Group

if TYPE_CHECKING:
    from kvcalc.model.spec import Model

Options = TypeVar("Options", bound=Group)


def told_by(words: Sequence[str], changes: list[str]) -> "tuple[tuple[list[str], list[Model]], dict[str, Any]]":
    """((names as they were typed, their models), what a command line says of the rest); flags that are not read are named."""
    if len(words) > 1 or " " in words[0].strip():
        from kvcalc.capacity.commands import is_command, read_command
        from kvcalc.capacity.dialects import DIALECTS
        from kvcalc.library.edit import edited

        if is_command(words):
            left = list(changes)
            command = read_command(words, left)
            for text in command.remarks:
                note(text)
            if command.ignored:
                note(f"{command.engine}: not counted here: {', '.join(command.ignored)}")
            told = {"engine": command.engine} | command.given
            if DIALECTS[command.engine].max_num_seqs_is_cap and "max_num_seqs" in told:
                told["users"] = 1  # the engine starts if one sequence fits
            if DIALECTS[command.engine].flag("all_experts") and told.pop("ep", 1) > 1:
                told["enable_expert_parallel"] = True  # over the GPUs that an option before the line may change
            return ([command.named], [edited(command.model, left)]), told
    return (model_words(words), chosen_models(words, changes)), {}


def filled(group: Options, told: Mapping[str, Any]) -> Options:
    """A group of options, those that were left as they are by default as a command line told them."""
    defaults = {f.name: f.default for f in msgspec.structs.fields(type(group)) if f.name in told}
    left = [name for name, default in defaults.items() if getattr(group, name) == default]
    return msgspec.structs.replace(group, **{n: str(told[n]) if isinstance(defaults[n], str) else told[n] for n in left})
