"""`kvcalc models`."""

from typing import Annotated

import typer

from kvcalc.cli.chosen import chosen_models, model_words
from kvcalc.cli.common import say, say_yaml
from kvcalc.cli.groups import Printing, grouped


@grouped
def run(
    name: Annotated[
        str, typer.Argument(help="One model, shown in full; a list; or part of a name: those that match.", show_default=False)
    ] = "",
    *,
    family: Annotated[str, typer.Option("--family", help="Keep models of this family.")] = "",
    attention: Annotated[
        str, typer.Option("--attention", help="Keep models with this in their attention: mla, gqa, window.")
    ] = "",
    import_: Annotated[str, typer.Option("--import", help="A config.json to write as a preset, on stdout.")] = "",
    output: Printing,
) -> None:
    """What model presets there are, and one in full."""
    from kvcalc.library.listing import all_models, beginning, model_record
    from kvcalc.library.load import load_model

    several = chosen_models([name], []) if len(model_words([name])) > 1 else []
    names = beginning(name, "models") if name and not several else []
    if import_:
        from kvcalc.library.huggingface.preset import imported

        say_yaml(imported(load_model(import_)))
    elif name and not names and not several:
        _one(name, output)
    elif not output.printed(records := [model_record(m) for m in several or all_models(family, attention, names)]):
        from kvcalc.report.layout import Table
        from kvcalc.report.tables import MODEL_COLUMNS

        about = "per token: one sequence at 8,192 tokens, bf16, all layers; `kvcalc models NAME` shows all of one, with sources"
        output.show(Table(records, MODEL_COLUMNS, notes=["", about]))


def _one(name: str, output: Printing) -> None:
    from kvcalc.library.listing import model_record, preset_text
    from kvcalc.library.load import load_model, locate

    model = load_model(name)
    if output.explain:
        from kvcalc.layers.ranks import ONE_GPU
        from kvcalc.model.precision import Precision
        from kvcalc.model.size import size_record
        from kvcalc.report.explain import explain_size

        asked = model, 8192, 1, Precision("bf16"), 16, ONE_GPU
        say(explain_size(size_record(*asked), *asked))
        return
    if output.printed([model_record(model)]):
        return
    if locate(name, "models").preset:
        say_yaml(preset_text(name, "models"))
    else:
        from kvcalc.library.huggingface.preset import to_yaml

        say_yaml(to_yaml(model))
