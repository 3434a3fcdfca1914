"""What a token costs against context length, of a GPU that decodes for one user, and for as many as fit."""

from collections.abc import Sequence
from typing import Any

from kvcalc.capacity import fit
from kvcalc.capacity.options import options_for
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.report.chart import Axis, Chart, Series, plain_tick, si_tick
from kvcalc.report.figures import CONTEXT_AXIS, powers
from kvcalc.report.figures_latency import timed_alike
from kvcalc.serving.latency import cost_per_million
from kvcalc.timing.deployment import Deployment

MOST_USERS = 256  # that an engine takes at once
FIRST = 1024  # tokens


def cost_vs_context(deployments: Sequence[Deployment], last: int, price_per_hour: float = 0.0) -> Chart:
    """Money per million generated tokens over context, FIRST to `last`; GPU hours where no price is given. Of decode alone.

    Left, of as many users as fit beside the weights, at most MOST_USERS; right, of one. Raises UserError where none fits.
    """
    deployments, undrawn = timed_alike(deployments)
    several = {name: len({f(d) for d in deployments}) > 1 for name, f in _NAMES.items()}
    full, alone, without = [], [], dict[str, list[str]]()
    for deployment in deployments:
        held = [(s, n) for s in powers(min(FIRST, last), last) if (n := _users(deployment, s))]
        label = " on ".join(f(deployment) for name, f in _NAMES.items() if several[name]) or deployment.model.name
        if not held:
            without.setdefault(deployment.model.name, []).append(deployment.gpu.name)
        else:
            contexts = tuple(s for s, _ in held)
            full.append(Series(label, contexts, _costs(deployment, contexts, [n for _, n in held], price_per_hour)))
            alone.append(Series(label, contexts, _costs(deployment, contexts, [1] * len(held), price_per_hour)))
    if not full:
        names = ", ".join(dict.fromkeys(d.model.name for d in deployments))
        raise UserError(f"no GPU asked for holds {names} and one user", hint="Give a larger one with --gpu")
    first = deployments[0]
    fixed = [f(first) for name, f in _NAMES.items() if not several[name]]
    price = [f"{price_per_hour:g} per GPU hour"] * bool(price_per_hour)
    lacking = [f"{name} does not fit on {', '.join(gpus)}" for name, gpus in without.items()]
    subtitle = "; ".join(
        [", ".join([*fixed, "decode alone", f"at most {MOST_USERS} users", *price]), f"times: {first.basis}", *lacking]
    )
    what = "cost" if price_per_hour else "GPU hours"
    cost = Axis(f"{what} per million tokens", tick=plain_tick if price_per_hour else si_tick("h"))
    one = Chart(
        f"{_capital(what)} against context: one user alone",
        "every step yields one token",
        CONTEXT_AXIS,
        cost._replace(log=False),
        tuple(alone),
    )
    title = f"{_capital(what)} against context: as many users as fit"
    return Chart(title, f"{subtitle}{undrawn}", CONTEXT_AXIS, cost, tuple(full), beside=one)


_NAMES: dict[str, Any] = {"model": lambda d: d.model.name, "gpu": lambda d: d.gpu.name}


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _users(deployment: Deployment, context: int) -> int:
    return min(MOST_USERS, fit(deployment, options_for(deployment, max_model_len=context)).sequences)


def _costs(deployment: Deployment, contexts: Sequence[int], users: Sequence[int], price: float) -> tuple[float, ...]:
    """Per million tokens: of a step of all users, which yields a token to each."""
    import numpy as np

    steps = deployment.seconds(Batch.decode(np.array(contexts, dtype=float), np.array(users, dtype=float)))
    gpus = deployment.parallelism.gpus
    return tuple(cost_per_million(price or 1.0, gpus, float(s), n) for s, n in zip(steps, users, strict=True))
