"""Deployments beside each other, the first being the one before: what a change makes of users and of time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.record import AS_CALLED, Typed, fit_record
from kvcalc.errors import few
from kvcalc.layers.batch import Batch
from kvcalc.planning.precisions import Stored, lowered
from kvcalc.storage.quality import UNKNOWN, losses_of
from kvcalc.timing.calibration import BOUND
from kvcalc.timing.deployment import Deployment

ARTICLE = {"weights": "", "cache": "a "}


class Side(NamedTuple):
    """One deployment as it was asked for, by the words that were typed."""

    text: str
    deployment: Deployment
    options: FitOptions
    typed: Typed = AS_CALLED


class Answer(NamedTuple):
    side: Side
    found: Fit
    tpot: float | None  # None if this batch does not fit
    ttft: float | None  # None where the GPU gives no matrix peak
    time_basis: str

    def tpot_beyond(self, first: "Answer") -> float | None:
        """Return the seconds by which TPOT exceeds the first side's; None if one is a bound and the other a prediction."""
        if self.tpot is None or first.tpot is None or (self.time_basis == BOUND) != (first.time_basis == BOUND):
            return None
        return self.tpot - first.tpot


def compared(sides: Sequence[Side], users: int = 0) -> tuple[list[dict[str, Any]], str, str]:
    """(a record for each side, the sentence about what the last changes, a remark). Times are of one batch on all of them:
    `users`, 0 for what the first holds, of its context. Raises UserError where a side cannot be had.
    """
    found = [fit(s.deployment, s.options) for s in sides]
    count, length = users or max(1, found[0].sequences), found[0].length
    answers = []
    for side, answer in zip(sides, found, strict=True):
        timed, prompt = _as_run(side).under(), Batch.prefill(length)
        first_token = float(timed.seconds(prompt)) if timed.timed(prompt) else None
        step = float(timed.seconds(Batch.decode(length, count))) if _holds(side, count, length) else None
        answers.append(Answer(side, answer, step, first_token, timed.time_basis))
    records = [_record(answer, answers[0], count, length) for answer in answers]
    short = [answer.side.text for answer in answers if answer.tpot is None]
    remark = f"no time per token, as {count:,} × {length:,} tokens do not fit: {few(short)}" if short else ""
    return records, _sentence(answers[0], answers[-1], count), remark


def _as_run(side: Side) -> Deployment:
    """Return the side's deployment under its engine."""
    options = side.options
    return msgspec.structs.replace(side.deployment, engine=options.engine, engine_version=options.engine_version)


def _holds(side: Side, count: int, length: int) -> bool:
    return fit(side.deployment, msgspec.structs.replace(side.options, max_model_len=length)).sequences >= count


def _record(answer: Answer, first: Answer, count: int, length: int) -> dict[str, Any]:
    own = {"deployment": answer.side.text, "batch_size": count, "context": length}
    times = {"tpot_s": answer.tpot, "ttft_s": answer.ttft, "time_basis": answer.time_basis}
    change = {
        "users_difference": answer.found.sequences - first.found.sequences,
        "tpot_difference_s": answer.tpot_beyond(first),
        "quality": "; ".join(costs(first.found, answer.found)) or None,
    }
    return own | times | change | fit_record(answer.found, typed=answer.side.typed)


def _sentence(before: Answer, after: Answer, count: int) -> str:
    """`fp8 cache: +7 users of 32,768 tokens (7 → 14), −0.3 ms a token; published: …`."""
    users = after.found.sequences - before.found.sequences
    old, new = before.found, after.found
    held = f"{users:+,} users of {new.length:,} tokens ({old.sequences:,} → {new.sequences:,})".replace("-", "−")
    if old.length != new.length:
        held = f"{old.sequences:,} users of {old.length:,} tokens → {new.sequences:,} of {new.length:,}"
    parts, longer = [held], after.tpot_beyond(before)
    if before.tpot is not None and after.tpot is not None and longer is not None:
        mark = "≥ " if before.time_basis == BOUND else ""
        times = f"{mark}{before.tpot * 1000:.2f} → {mark}{after.tpot * 1000:.2f} ms, {count:,} at once"
        parts.append(f"{longer * 1000:+.2f} ms a token ({times})".replace("-", "−"))
    paid = "; ".join(costs(before.found, after.found))
    return f"{changed(before.found, after.found)}: {', '.join(parts)}" + (f"; {paid}" if paid else "")


def changed(before: Fit, after: Fit) -> str:
    """What differs, in few words."""
    pairs = (
        ("", before.model.name, after.model.name),
        ("", f"{before.ranks.gpus}× {before.gpu.name}", f"{after.ranks.gpus}× {after.gpu.name}"),
        ("weights in ", before.formats.weights_label, after.formats.weights_label),
        ("cache in ", _cache(before), _cache(after)),
        ("engine ", before.options.engine, after.options.engine),
    )
    said = [f"{what}{new}" if what else f"{new}" for what, old, new in pairs if old != new]
    names = [n for n in FitOptions.__struct_fields__ if n not in ("engine", "draft", "from_log")]
    said += [
        f"{n.replace('_', '-')} {getattr(after.options, n)}"
        for n in names
        if getattr(before.options, n) != getattr(after.options, n)
    ]
    ranks = [n for n in ("tp", "pp", "dp", "ep", "dcp") if getattr(before.ranks, n) != getattr(after.ranks, n)]
    said += [f"{n} {getattr(after.ranks, n)}" for n in ranks]
    return ", ".join(said) or "no difference"


def costs(before: Fit, after: Fit) -> list[str]:
    """What lower precision and a shorter context cost: the published measurements, or that none is noted."""
    old, new = (Stored(f.formats.weights_label, _cache(f)) for f in (before, after))
    said = [
        _published(f"{ARTICLE[low.what]}{low.what} in {low.format}", losses_of(low.what, low.format)) for low in lowered(old, new)
    ]
    if after.length < before.length:
        said.append(f"prompts beyond {after.length:,} tokens are refused: {UNKNOWN}")
    return said


def _published(what: str, loss: str) -> str:
    return f"of {what}, {loss}" if loss == UNKNOWN else f"published of {what}: {loss}"


def _cache(found: Fit) -> str:
    return found.options.cache_label(found.formats.kv_cache_dtype)
