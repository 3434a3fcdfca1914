"""`kvcalc models`.

`kvcalc gpus`.
"""

from typing import TYPE_CHECKING, Annotated

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import (
    Output,
    Printing,
    chosen_gpus,
    chosen_models,
    model_words,
)
from kvcalc.cli.options import Argument, Option, say, say_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcalc.gpu.gpu import Gpu


def run_models(
    name: Annotated[
        str,
        Argument(
            "Model to show in full, a list, or a part of names",
            takes="MODEL",
            words=o.model_names,
        ),
    ] = "",
    *,
    family: Annotated[str, Option("List only models of this family")] = "",
    attention: Annotated[
        str, Option("List only models with this attention: mla, gqa or window")
    ] = "",
    import_: Annotated[str, Option("Print a config.json as a preset", "--import", "FILE")] = "",
    output: Printing,
) -> None:
    """List model presets, or show one in full."""
    from kvcalc.library.load import all_models, beginning, load_model, model_record

    several = chosen_models([name], []) if len(model_words([name])) > 1 else []
    names = beginning(name, "models") if name and not several else []
    if import_:
        from kvcalc.library.huggingface.notes import imported

        say_yaml(imported(load_model(import_)))
    elif name and not names and not several:
        _one(name, output)
    elif not output.printed(
        records := [model_record(m) for m in several or all_models(family, attention, names)]
    ):
        from kvcalc.report.text.preset_text import model_table

        output.show(model_table(records))


def _one(name: str, output: Printing) -> None:
    from kvcalc.library.load import load_model, locate, model_record, preset_text

    model = load_model(name)
    if output.explain:
        from kvcalc.layers.batch import ONE_GPU
        from kvcalc.model.memory import size_record
        from kvcalc.model.precision import Precision
        from kvcalc.report.explain import explain_size

        requested = model, 8192, 1, Precision("bf16"), 16, ONE_GPU
        say(explain_size(size_record(*requested), *requested))
        return
    if output.printed([model_record(model)]):
        return
    if locate(name, "models").preset:
        say_yaml(preset_text(name, "models"))
    else:
        from kvcalc.library.huggingface.notes import to_yaml

        say_yaml(to_yaml(model))


def run_gpus(
    name: Annotated[
        str,
        Argument(
            "GPU to show in full, a list, or a part of names",
            takes="GPU",
            words=o.gpu_names,
        ),
    ] = "",
    *,
    vendor: Annotated[
        str,
        Option("List only GPUs of this vendor or architecture", "--vendor --family"),
    ] = "",
    output: Output,
) -> None:
    """List GPU presets, or show one in full."""
    from kvcalc.library.load import all_gpus, beginning, load_gpu

    several = chosen_gpus(name) if "," in name else []
    names = beginning(name, "gpus") if name and not several else []
    if (
        name
        and not names
        and not several
        and name.lower() in {gpu.vendor.lower() for gpu in all_gpus()}
    ):
        several = all_gpus(name)
    if name and not names and not several:
        _one_gpus(name, load_gpu(name), output)
    else:
        _listed(several or all_gpus(vendor, names), output)


def _one_gpus(name: str, gpu: "Gpu", output: Output) -> None:
    """Its memories, and its preset with the sources."""
    from kvcalc.library.load import gpu_record, preset_text

    if output.plot:
        from kvcalc.report.charts.fit_plot import hierarchy_chart

        output.picture(hierarchy_chart(gpu))
    if output.printed([gpu_record(gpu)]):
        return
    from kvcalc.report.text.roofline_text import hierarchy_table

    if output.explain:
        from kvcalc.report.text.preset_text import gpu_table

        output.show(gpu_table([gpu_record(gpu)]), hierarchy_table(gpu))
    else:
        from kvcalc.report.text.tables import fitted

        lines = fitted(hierarchy_table(gpu), beside=2)
        say_yaml(
            "".join(f"# {line}".rstrip() + "\n" for line in lines)
            + "\n"
            + preset_text(name, "gpus")
        )


def _listed(gpus: "Sequence[Gpu]", output: Output) -> None:
    from kvcalc.library.load import gpu_record

    if output.plot:
        from kvcalc.report.charts.fit_plot import peaks_chart

        output.picture(peaks_chart(gpus))
    if not output.printed(records := [gpu_record(gpu) for gpu in gpus]):
        from kvcalc.report.text.preset_text import gpu_table

        output.show(gpu_table(records))
