"""`kvcalc models`."""

import sys
from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import emit


def run(
    name: Annotated[str, typer.Argument(help="One model, shown in full.", show_default=False)] = "",
    family: Annotated[str, typer.Option("--family", help="Keep models of this family.")] = "",
    attention: Annotated[
        str, typer.Option("--attention", help="Keep models with this in their attention: mla, gqa, window.")
    ] = "",
    import_: Annotated[str, typer.Option("--import", help="A config.json to write as a preset, on stdout.")] = "",
    output: o.PrintedAs = o.OutputFormat.table,
) -> None:
    """What model presets there are, and one in full."""
    from kvcalc.library.listing import all_models, model_record
    from kvcalc.library.load import load_model

    if import_:
        from kvcalc.library.huggingface.preset import imported

        sys.stdout.write(imported(load_model(import_)))
    elif name:
        _one(name, output)
    elif not emit(records := [model_record(m) for m in all_models(family, attention)], output):
        from kvcalc.report.tables import MODEL_COLUMNS, Table, show

        about = "per token: one sequence at 8,192 tokens, bf16, all layers. `kvcalc models NAME` shows sources"
        show(Table(records, MODEL_COLUMNS, notes=["", about]))


def _one(name: str, output: o.OutputFormat) -> None:
    from kvcalc.library.listing import model_record, preset_text
    from kvcalc.library.load import load_model, locate

    model = load_model(name)
    if emit([model_record(model)], output):
        return
    if locate(name, "models").preset:
        sys.stdout.write(preset_text(name, "models"))
    else:
        from kvcalc.library.huggingface.preset import to_yaml

        sys.stdout.write(to_yaml(model))
