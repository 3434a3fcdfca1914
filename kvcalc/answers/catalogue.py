"""`kvcalc models`, `kvcalc gpus` and `kvcalc schema`."""

import json
import shutil
from typing import TYPE_CHECKING

from kvcalc.answers.answer import Answer
from kvcalc.answers.deployments import gpu_words, model_words, models_of
from kvcalc.errors import UserError
from kvcalc.library.load import (
    all_gpus,
    all_models,
    beginning,
    gpu_record,
    load_gpu,
    load_model,
    locate,
    model_record,
    preset_text,
)
from kvcalc.report.text.tables import gpu_table, model_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcalc.gpu.gpu import Gpu
    from kvcalc.report.charts.chart import Chart

# words in the printed names of attention, by which `models` selects
ATTENTIONS = "mha, mqa, gqa, mla, dsa, window, mamba, deltanet"


def run_models(
    model_name: str = "", *, family: str = "", attention: str = "", import_: str = ""
) -> Answer:
    """List model presets, or show one in full.

    A preset is a YAML file with the layers of a known model.

    The answer has a record per preset, such as parameters and cache bytes per token. A model in
    full is printed as its YAML text.

    Args:
        model_name: Model to show in full, a comma-separated list of models, a part of preset names,
            or an attention such as mla; '' for all presets.
        family: List only models of this family; '' for all.
        attention: List only models with this attention: mla, gqa or window; '' for all.
        import_: Path of a config.json, or another model name, to print as the YAML text of a
            preset; '' to list presets.
    """
    from kvcalc.library.huggingface.notes import preset_text_of

    if model_name.lower() in ATTENTIONS.split(", "):
        model_name, attention = "", model_name
    if import_:
        model = load_model(import_)
        return Answer([model_record(model)], list, _yaml=preset_text_of(model))
    names = beginning(model_name, "models") if model_name else []
    if len(model_words([model_name])) > 1:
        models = models_of([model_name])
    elif model_name and not names:
        return _model_answer(model_name)
    else:
        models = all_models(family, attention, names)
    if not models:
        raise UserError("no preset matches", f"Words of --attention: {ATTENTIONS}")
    records = [model_record(model) for model in models]
    return Answer(records, lambda: [model_table(records)])


def _model_answer(name: str) -> Answer:
    from kvcalc.library.huggingface.notes import to_yaml

    model = load_model(name)

    def formulas() -> str:
        from kvcalc.layers.batch import ONE_GPU
        from kvcalc.model.memory import size_record
        from kvcalc.model.precision import Precision
        from kvcalc.report.explain import explain_size

        shape = model, 8192, 1, Precision("bf16"), 16, ONE_GPU
        return explain_size(size_record(*shape), *shape)

    text = preset_text(name, "models") if locate(name, "models").preset else to_yaml(model)
    return Answer([model_record(model)], list, _formulas=formulas, _yaml=text)


def run_gpus(gpu_name: str = "", *, vendor: str = "") -> Answer:
    """List GPU presets, or show one in full.

    A preset is a YAML file with the datasheet values of a GPU.

    The answer has a record per preset, such as memory, bandwidth and FLOP rates. A GPU in full is
    printed as a table of its memories and its YAML text.

    Args:
        gpu_name: GPU to show in full, a comma-separated list of GPUs, a vendor, or a part of preset
            names; '' for all presets.
        vendor: List only GPUs with this text in their vendor or architecture; '' for all.
    """
    if "," in gpu_name:
        return _gpus_answer([load_gpu(word) for word in gpu_words(gpu_name)])
    names = beginning(gpu_name, "gpus") if gpu_name else []
    if not gpu_name or names:
        return _gpus_answer(all_gpus(vendor, names) or [load_gpu(vendor)])
    if gpu_name.lower() in {gpu.vendor.lower() for gpu in all_gpus()}:
        return _gpus_answer(all_gpus(gpu_name))
    return _gpu_answer(gpu_name, load_gpu(gpu_name))


def _gpu_answer(name: str, gpu: "Gpu") -> Answer:
    """Return the answer about one GPU: its memories, and its preset with the sources."""
    from kvcalc.report.text.roofline_text import hierarchy_table
    from kvcalc.report.text.table_layout import WIDTH, lay_out

    record, memories = gpu_record(gpu), hierarchy_table(gpu)

    laid_out = lay_out(memories, shutil.get_terminal_size((WIDTH, 0)).columns - 2)
    lines = [f"# {line}".rstrip() for line in laid_out.lines()]
    text = "\n".join([*lines, "", preset_text(name, "gpus")])

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.size_plot import hierarchy_chart

        return [hierarchy_chart(gpu.name, memories.records)]

    return Answer([record], lambda: [gpu_table([record]), memories], draw, _yaml=text)


def _gpus_answer(gpus: "Sequence[Gpu]") -> Answer:
    records = [gpu_record(gpu) for gpu in gpus]
    return Answer(records, lambda: [gpu_table(records)])


def run_schema(command: str) -> None:
    """Print the JSON Schema of the records that a command prints with `--format json`.

    Args:
        command: Name of the command, such as `fit`.

    Raises:
        UserError: The command is unknown, or prints no records.
    """
    from kvcalc.report.export import schema_of_command

    print(json.dumps(schema_of_command(command), indent=2, ensure_ascii=False))
