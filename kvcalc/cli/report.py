"""`kvcalc report`."""

from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import lengths, save_text, say
from kvcalc.cli.groups import Deploying, grouped
from kvcalc.library.engine_choice import DATASHEET


@grouped
def run(
    model: o.OneModel,
    *,
    gpu: Annotated[str, typer.Option("--gpu", help="GPU preset or YAML file.")] = "h100",
    output: Annotated[str, typer.Option("--output", "-o", help="The page; - prints it.")] = "report.html",
    context: Annotated[str, typer.Option("--context", help="Tokens of each user: 32k.")] = "8192",
    users: Annotated[int, typer.Option("--users", help="Sequences at once.")] = 8,
    deploying: Deploying,
    explain: o.Explain = False,
) -> None:
    """One self-contained page to send."""
    from kvcalc.errors import UserError
    from kvcalc.library.writing import destination
    from kvcalc.report.web import Asked, html_page, page_explained

    if output != "-" and not explain:
        destination(output)
    deployments, contexts = deploying.deployments([model], gpu), lengths(context, "context")
    if len(deployments) != 1 or len(contexts) != 1:
        raise UserError("a page is about one deployment and one context", hint="Make a page of each; `kvcalc fit` takes lists")
    stored, run_on = _words(deploying)
    asked = Asked((model, *stored), ("--gpu", gpu, *run_on), contexts[0], users)
    if explain:
        say(page_explained(deployments[0], asked))
        return
    save_text(output, html_page(deployments[0], asked))


def _words(deploying: Deploying) -> tuple[list[str], list[str]]:
    """The options that were given: of how the model is stored and cut, and of how it is run."""
    precisions, ranks = deploying.precisions, deploying.ranks
    further = ranks.further
    sizes = {"--tp": (ranks.tp, "1"), "--dp": (further.dp, 1), "--ep": (further.ep, 1), "--dcp": (further.dcp, 1)}
    formats = {
        "--dtype": (precisions.dtype, "auto"),
        "--kv-cache-dtype": (precisions.kv_cache_dtype, "auto"),
        "--quantization": (precisions.quantization, ""),
    }
    stored = [word for name, (value, usual) in (sizes | formats).items() if value != usual for word in (name, str(value))]
    stored += ["--enable-expert-parallel"] if further.enable_expert_parallel else []
    stored += [word for change in deploying.set_ for word in ("--set", change)]
    choice = deploying.choices()[0]
    bounds = ["--bounds"] if choice.calibration == DATASHEET else []
    running = {
        "--mla-form": (deploying.mla_form, "auto"),
        "--memory": (deploying.memory, ""),
        "--engine": (choice.engine, "vllm"),
        "--engine-version": (deploying.engine_version, ""),
        "--calibration": (choice.calibration if not bounds else "", ""),
        "--calibration-from": (deploying.calibration_from, ""),
    }
    words = [word for name, (value, usual) in running.items() if value != usual for word in (name, str(value))]
    return stored, words + bounds
