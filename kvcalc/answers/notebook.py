"""The Python API: the commands as functions and as methods of a deployment."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from kvcalc.answers.answer import Answer
from kvcalc.answers.compare import VariantOptions, compare_answer
from kvcalc.answers.deployments import deployment_of, precision_of
from kvcalc.answers.fit import fit_answer
from kvcalc.answers.latency import latency_answer
from kvcalc.answers.plan import plan_answer
from kvcalc.answers.python_functions import GpuOrName, ModelOrName, as_gpu, as_model, of_kind
from kvcalc.answers.roofline import PassOptions, roofline_answer
from kvcalc.answers.serve import serve_answer
from kvcalc.answers.size import size_answer
from kvcalc.capacity.fit_options import read_fit_options
from kvcalc.errors import UserError
from kvcalc.library.load import with_changes, with_memory, with_rate_between
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.question.deployment_options import DeploymentOptions
from kvcalc.question.fit_question import FitQuestion, StudyOptions
from kvcalc.question.options import (
    Question,
    check_known,
    parameters_in,
    read_question,
    read_questions,
)
from kvcalc.question.serving_options import (
    LatencyOptions,
    SchedulingOptions,
    ServerSettings,
    Workload,
)
from kvcalc.question.size_options import ContextOptions, SizeOptions
from kvcalc.records import Settings
from kvcalc.timing import deployment


def takes_options(
    *questions: type[Question],
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Return a decorator for methods of `Deployment` that take the options of question classes.

    The decorated method takes each option by keyword, or the first options by position. The
    decorator collects them in a dictionary, which the original method receives as its only
    argument. It also adds the options' help to the method's docstring.

    Args:
        questions: Classes whose fields are the options. A question is a group of options.
    """
    parameters = [p for question in questions for p in parameters_in(question)]
    names = [p.name for p in parameters]

    def decorate(method: Callable[..., Answer]) -> Callable[..., Answer]:
        def run(self: "Deployment", *values: Any, **options: Any) -> Answer:
            if len(values) > len(names):
                raise TypeError(f"{method.__name__} takes at most {len(names)} arguments")
            options = dict(zip(names, values)) | options
            check_known(options, names)
            return method(self, options)

        lines = [f"    {p.name}: {p.option.help} [{p.default!r}]" for p in parameters]
        run.__name__ = method.__name__
        run.__doc__ = "\n        ".join([f"{method.__doc__}\n", "Args:", *lines]) + "\n"
        return run

    return decorate


class Deployment(deployment.TimedDeployment, frozen=True):
    """A model on one replica of GPUs. Each method answers like the command of the same name.

    The methods take the command's options as keyword arguments, and raise the command's errors. A
    value is a text as on the command line, or a Python value. A list gives a record per item, if
    the option takes a list.

    Attributes:
        file_precision: Requested data types of weights and cache, which `size` uses. The inherited
            `precision` differs for a float32 checkpoint if the engine loads it in another dtype.
            None for the data types of `precision`.
    """

    file_precision: Precision | None = None

    @takes_options(SizeOptions)
    def size(self, options: Settings) -> Answer:
        """Compute KV cache bytes on one GPU: `stored`, `read` by a decode step, and `allocated`.

        These attributes of the answer are for the whole batch, on the GPU that stores the most.
        `allocated` counts whole blocks. One sequence stores `fixed` bytes, plus `slope` bytes per
        token. Options such as `context=8192` are passed by keyword.
        """
        variant = self.model, self.file_precision or self.precision, self.parallelism
        return size_answer([variant], read_questions(SizeOptions, options), [self.gpu])

    @takes_options(FitQuestion, StudyOptions)
    def fit(self, options: Settings) -> Answer:
        """Compute users and memory: `fits`, `max_num_seqs`, `max_model_len`, `kv_budget_bytes`.

        `fits` says whether the requested users fit, by default one. `max_num_seqs` is the number of
        sequences that fit on the replica, and `kv_budget_bytes` the memory for the KV cache on one
        GPU. Without the option max_model_len, the length is the model's maximum, or the longest
        that fits. The default engine is the engine of the deployment.
        """
        if options.get("engine", self.engine) == self.engine:
            options = {"engine": self.engine, "engine_version": self.engine_version} | options
        points = [(self, fit_option) for fit_option in read_fit_options(options)]
        return fit_answer(points, read_question(StudyOptions, options))

    @takes_options(LatencyOptions)
    def latency(self, options: Settings) -> Answer:
        """Predict one batch of equal requests: `ttft_s`, `tpot_s`, `e2e_s` and more.

        `ttft_s` is the seconds to the first token, `tpot_s` the mean seconds per further token, and
        `e2e_s` the seconds to the last token.
        """
        return latency_answer([self], read_questions(LatencyOptions, options))

    @takes_options(PassOptions, ContextOptions)
    def roofline(self, options: Settings) -> Answer:
        """Compute FLOPs, bytes and bound of each operator in one forward pass, on one GPU.

        The bound is compute, memory or network. With pipeline parallelism, values are sums over one
        GPU of each stage. The answer has a record per operator, then their total. Its attributes
        are the keys of the total.
        """
        return roofline_answer(
            [self], read_question(PassOptions, options), read_questions(ContextOptions, options)
        )

    @takes_options(SchedulingOptions, Workload, ServerSettings)
    def serve(self, options: Settings) -> Answer:
        """Simulate a server under load, for `throughput_tokens_per_s`, `ttft_p50_s` and more.

        Rates are of the whole replica. If none of rate, requests and max_concurrency is given,
        several request rates are tried. The first record is then of the highest rate that the
        server sustains. Further records follow, one for each rate that was tried.
        """
        scheduling = read_questions(SchedulingOptions, options)
        settings = read_questions(ServerSettings, options)
        return serve_answer([self], options, scheduling, settings)

    @takes_options(VariantOptions, SizeOptions)
    def compare(self, options: Settings) -> Answer:
        """Compare variants of the model's attention, such as MHA and GQA: one record per variant.

        There are further records per context and batch size. A record has the variant's KV cache,
        its decode step time and its published quality. Reductions are the bytes of the first
        variant ÷ the bytes of the record's variant.
        """
        names = read_question(VariantOptions, options).variants
        return compare_answer([self], names, read_questions(SizeOptions, options))

    def __repr__(self) -> str:
        sizes = msgspec.structs.asdict(self.parallelism).items()
        ranks = " ".join(f"{name} {size}" for name, size in sizes if size > 1)
        gpus = f"{self.parallelism.gpus} × {self.gpu.name}{f' ({ranks})' if ranks else ''}"
        formats = self.formats
        return (
            f"{self.model.name} on {gpus}: weights {formats.weights_label}, "
            f"cache {formats.kv_cache_dtype}; times: {self.basis}"
        )


DEPLOYING = frozenset(DeploymentOptions.__struct_fields__)


def deploy(model: ModelOrName, gpu: GpuOrName = "h100", **options: Any) -> Deployment:
    """Return a deployment: a model on one replica of GPUs, whose methods answer questions about it.

    Example: `deploy("llama-3.1-70b", "h100", tp=4).fit(max_model_len="32k")`.

    Args:
        model: Model, or its name or file.
        gpu: GPU, or its name or file.
        options: Fields of `DeploymentOptions`, such as tp, pp, dp, ep, dcp, dtype, kv_cache_dtype,
            quantization, memory, nodes, engine, bounds and calibration.

    Raises:
        UserError: An option is unknown, invalid or a list, or the model cannot be split over GPUs
            in this way.
    """
    check_known(options, DEPLOYING)
    deploying = read_questions(DeploymentOptions, options)
    if len(deploying) > 1:
        raise UserError(
            "a deployment has one value of each option", "Call deploy once for each"
        )
    machine = with_memory(as_gpu(gpu), deploying[0].memory)
    result = deployment_of(
        with_changes(as_model(model), list(deploying[0].set_)),
        with_rate_between(machine, deploying[0].inter_node_bandwidth),
        deploying[0],
        Deployment,
    )
    _ = result.ranks  # raises UserError if the ranks cannot be placed
    return cast(Deployment, replace(result, file_precision=precision_of(deploying[0])))


def _command(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Return a function that deploys a model and calls a method of the deployment."""

    def run(model: ModelOrName | Deployment, **options: Any) -> Answer:
        deploying = DEPLOYING & options.keys()
        if not isinstance(model, Deployment):
            model = deploy(model, **{key: options.pop(key) for key in deploying})
        elif fixed := deploying - {"engine", "engine_version"}:
            raise UserError(
                f"the deployment already has {', '.join(sorted(fixed))}",
                "Give these options to deploy",
            )
        return method(model, **options)

    run.__name__ = method.__name__
    run.__doc__ = f"""{method.__doc__}
    The first argument is a model or a Deployment. A model also takes the options of `deploy`.
    """
    return run


size = _command(Deployment.size)
fit = _command(Deployment.fit)
latency = _command(Deployment.latency)
roofline = _command(Deployment.roofline)
serve = _command(Deployment.serve)
compare = _command(Deployment.compare)


def find_plan(models: ModelOrName | Sequence[ModelOrName], **options: Any) -> Answer:
    """Find the best deployments for a load and its latency targets: at most five for each model.

    A deployment that meets the targets is better if it costs less, or without prices if it has
    fewer GPUs; then if its TPOT is lower. Without prices, the best of each GPU model come first. If
    no deployment meets the targets, the result is the one of each model that misses them least. Up
    to five more follow that have only datasheet bounds. The answer's attributes are the keys of the
    first record.

    Args:
        models: A model or a list of models.
        options: Options of `kvcalc plan`, each a word, a number or a list: users and context, or
            rate, input_len and output_len; max_ttft, max_tpot (`50ms`), min_throughput; gpu,
            max_gpus (16), quantization, price_per_hour and more.
    """
    if isinstance(models, str | Path | Model):
        models = [models]
    if not of_kind(models, "list of models", list, tuple):
        raise UserError(
            "a plan takes a model", 'Write kvcalc.plan("llama-3.1-8b", users=64, context="16k")'
        )
    return plan_answer([as_model(model) for model in models], options)


plan = find_plan
