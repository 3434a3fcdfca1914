"""`kvcalc latency`."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvcalc.answers.answer import MAX_PASSES, Answer
from kvcalc.answers.deployments import deployments_of, remarks
from kvcalc.question.deployment_options import DeploymentOptions
from kvcalc.question.options import check_number
from kvcalc.question.serving_options import LatencyOptions

if TYPE_CHECKING:
    from kvcalc.report.charts.chart import Chart
    from kvcalc.timing.deployment import TimedDeployment


def run(
    models: list[str], *, requests: list[LatencyOptions], deploying: list[DeploymentOptions]
) -> Answer:
    """Predict TTFT, TPOT and end-to-end seconds of one batch of equal requests.

    The answer has a record for each combination of deployment and request. Without a calibration
    (time models fitted to measured kernels), times are datasheet bounds.

    Args:
        models: Models, each word a name or a comma-separated list.
        requests: Prompt length, output length and batch size.
        deploying: GPU, data types, parallelism and engine of each deployment.
    """
    return latency_answer(deployments_of(models, deploying), requests)


def latency_answer(
    deployments: "Sequence[TimedDeployment]", requests: Sequence[LatencyOptions]
) -> Answer:
    """Return TTFT, TPOT and end-to-end seconds of each request on each deployment.

    Args:
        deployments: The deployments, each a model on one replica of GPUs.
        requests: Prompt length, output length and batch size of each batch of equal requests.
    """
    from kvcalc.report.text.serving_text import latency_tables
    from kvcalc.serving.request_latency import largest_batch, latency_records

    check_number("rows", MAX_PASSES, deployments, requests)
    points = []
    for deployment, request in product(deployments, requests):
        if request.no_cache or request.draft:
            deployment.model.check_generates()
        if request.max_tpot:
            request = largest_batch(deployment, request)
        only_prefill = replace(request, output_len=1)
        points.append((deployment, only_prefill if deployment.model.pooling else request))
    records = latency_records(points)

    def draw() -> "list[Chart]":
        from kvcalc.planning.sweeps import latency_sweep
        from kvcalc.report.charts.load_plot import latency_chart

        return latency_chart(
            latency_sweep(deployments, [request for _, request in points]), requests[0]
        )

    notes = remarks(
        [deployment.model for deployment in deployments],
        max(request.context for request in requests),
    )
    return Answer(records, lambda: latency_tables(records), draw, _notes=notes)
