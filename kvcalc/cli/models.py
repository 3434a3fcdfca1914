"""`kvcalc models`."""

import sys
from pathlib import Path
from typing import Annotated, Any

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
    output: o.Output = o.OutputFormat.table,
) -> None:
    """What model presets there are, and one in full."""
    from kvcalc.library.load import load_model

    if import_:
        from kvcalc.library.huggingface.preset import imported

        sys.stdout.write(imported(load_model(import_)))
        return
    if name:
        _one(name, output)
        return
    records = [r for r in map(_record, _all()) if _keep(r, family, attention)]
    if not emit(records, output):
        from kvcalc.report.tables import MODEL_COLUMNS, show

        show(
            records,
            MODEL_COLUMNS,
            notes=["", "per token: one sequence at 8,192 tokens, bf16, all layers. `kvcalc models NAME` shows sources"],
        )


def _all() -> list[Any]:
    from kvcalc.library.catalog import preset_files
    from kvcalc.library.load import read
    from kvcalc.model.spec import Model

    found = [read(path, Model) for path in preset_files("models").values()]
    return sorted(found, key=lambda m: (m.family, m.parameters))


def _record(model: Any) -> dict[str, Any]:
    from kvcalc.model.memory import cache_size
    from kvcalc.model.precision import Precision

    return {
        "model": model.name,
        "family": model.family,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "layers": model.layers,
        "hidden_size": model.hidden_size,
        "attention": model.attention,
        "bytes_per_token": cache_size(model, 8192, precision=Precision("bf16", "bf16")).slope,
        "max_context": model.max_context,
        "huggingface_id": model.huggingface_id,
        "source": "; ".join(s.url for s in model.source),
    }


def _keep(record: dict[str, Any], family: str, attention: str) -> bool:
    same_family = family.lower() in record["family"].lower() or family.lower() in record["model"]
    return same_family and attention.lower() in record["attention"].lower()


def _one(name: str, output: o.OutputFormat) -> None:
    from kvcalc.library.catalog import find
    from kvcalc.library.load import _is_file_name, load_model

    model = load_model(name)
    if emit([_record(model)], output):
        return
    if _is_file_name(name) or "/" in name:
        from kvcalc.library.huggingface.preset import to_yaml

        sys.stdout.write(to_yaml(model))
    else:
        sys.stdout.write(Path(find(name, "models")).read_text(encoding="utf-8"))
