"""The picture of `plan`: the front of what deployments do against what they take, the answer, and the limit."""

from collections.abc import Sequence

from kvcalc.planning.best import Answer
from kvcalc.planning.front import knees
from kvcalc.planning.reasons import reason
from kvcalc.planning.search import Plan
from kvcalc.report.chart import Axis, Chart, Series, plain_tick
from kvcalc.report.looks import telling
from kvcalc.report.plans import asked, sentence, where
from kvcalc.report.tables import BOUND, seconds

BASES = {"bound": "datasheet bounds", "calibrated": "predicted", "scaled": "scaled from another GPU"}
ANSWER, POINT = "the answer", "a point is a deployment that none beats in both"
MOST_NAMED = 6  # fronts beside each other, beyond which but the answer of each has its name


def fronts(plan: Plan) -> tuple[list[Chart], list[str]]:
    """The front of each answer that has one, and what is said of the others."""
    found = [(answer, bool(len(answer.front.xs))) for answer in plan.answers]
    drawn = [answer for answer, drawn in found if drawn]
    missing = [f"not in the picture: {sentence(answer)}" for answer, drawn in found if not drawn]
    return _together([front_chart(answer) for answer in drawn], drawn) if drawn else [], missing


def _together(charts: list[Chart], answers: Sequence[Answer]) -> list[Chart]:
    """Fronts of several models or needs, each under what tells it from the others, all under what they have in common."""
    parts, bases = [(_model(answer), asked(answer.need)) for answer in answers], {*map(_basis, answers)}
    told, same = telling(parts), [words for words, *more in map(set, zip(*parts, strict=True)) if not more and words]
    if len(charts) == 1 or not all(told):
        return charts
    about = [_found(answer) + f"; {_basis(answer)}" * (len(bases) > 1) for answer in answers]
    charts = [c._replace(title=" for ".join(t), subtitle=s) for c, t, s in zip(charts, told, about, strict=True)]
    if len(charts) > MOST_NAMED:
        charts = [c._replace(series=tuple(s._replace(labels=s.labels * (s.label == ANSWER)) for s in c.series)) for c in charts]
    over = " for ".join(same) or f"What {len(charts)} needs take", "; ".join([POINT, *(bases if len(bases) == 1 else ())])
    return [charts[0]._replace(over=over), *charts[1:]]


def front_chart(answer: Answer) -> Chart:
    """The front of TPOT against throughput of a GPU (or per price), labelled where it bends, with the answer and the limit."""
    front, per = answer.front, "tokens/s per price of an hour" if answer.prices else "tokens/s per GPU"
    bends = set(knees(front.xs, front.ys))
    first = answer.best[0] if answer.best else None
    shown = first.setting if first else None
    xs, ys = tuple(front.xs.tolist()), tuple(front.ys.tolist())
    series = [Series("", xs, ys, "edge", colour=0)]
    for label, kind, meets in (("meets the need", "points", True), ("does not", "hollow", False)):
        found = [at for at, point in enumerate(front.what) if point.meets == meets and point.setting != shown]
        labels = tuple(where(front.what[at]) if at in bends else "" for at in found)
        series += [Series(label, tuple(xs[at] for at in found), tuple(ys[at] for at in found), kind, labels=labels, colour=0)]
    if first and first.tpot:
        price = answer.prices.get(first.gpu, 1.0)
        speed = float(first.block.rate_per_gpu[first.at]) / price
        series.append(Series(ANSWER, (first.tpot,), (speed,), "points", (0.1,), (where(first),), colour=1))
    if answer.need.max_tpot and xs and max(xs) > answer.need.max_tpot / 2:
        series.append(Series(f"at most {seconds(answer.need.max_tpot)}", (answer.need.max_tpot,), (1.0,), "upright"))
    title = " for ".join(filter(None, (_model(answer), asked(answer.need))))
    about = f"{_found(answer)}; {POINT}; {_basis(answer)}"
    return Chart(title, about, Axis("TPOT", tick=seconds), Axis(per, tick=plain_tick), tuple(s for s in series if s.xs))


def _basis(answer: Answer) -> str:
    text = BASES.get(answer.basis, answer.basis)
    return text if answer.basis == BOUND or not len(answer.fronts[True].xs) else f"{text}, bounds not drawn"


def _model(answer: Answer) -> str:
    """The model that the answer, or what comes nearest, serves."""
    chosen = answer.best or ([answer.nearest] if answer.nearest else [])
    return chosen[0].deployment.model.name if chosen else ""


def _found(answer: Answer) -> str:
    """The answer in a few words."""
    if answer.best:
        return f"{where(answer.best[0])} is the cheapest" if answer.prices else f"{where(answer.best[0])}: the fewest GPUs"
    return (
        f"nothing meets it; nearest is {where(answer.nearest)}: {reason(answer.nearest)}"
        if answer.nearest
        else "nothing meets it"
    )
