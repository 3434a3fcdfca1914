"""What `fit` says first: how many users, and how long a context may be; else what is missing."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcalc.capacity import Fit
from kvcalc.capacity.remedy import advice, small_cache
from kvcalc.storage.quality import loss_of

CACHES = {"fp8": "an fp8 cache", "q8_0": "a q8_0 cache"}
Row = Mapping[str, Any]


def said_first(rows: Sequence[Row], found: Sequence[Fit], typed: Mapping[str, str] | None = None) -> str:
    """Of the smallest that holds what was asked, at each length or number asked of it; of none, the one that lacks the least."""
    first, answer = rows[0], found[0]
    if not answer.fits:
        return _lacking(rows, found, typed)
    there = [(r, f) for r, f in zip(rows, found, strict=True) if f.asked == answer.asked and f.engine is answer.engine]
    if "asked" in first and "length" not in first:
        held = ", ".join(f"{_users(f.options.wanted)} to {r['longest']} tokens" for r, f in there)
        return f"{first['model']}: on {where(answer)} fit {held}"
    users = answer.sequences
    said = f"{first['model']}: {_users(users)} of {answer.length:,} tokens fit{'s' * (users == 1)} on {where(answer)}"
    if "length" in first and "asked" not in first:
        return said + "".join(f", {f.sequences:,} of {f.length:,}" for _, f in there[1:])
    smallest = f"; the smallest that holds {_need(answer)}" if len({where(f) for f in found}) > 1 else ""
    return f"{said}{_beside(first, answer)}{_longest(first, answer)}{smallest}"


def where(found: Fit) -> str:
    """The GPUs, and how they share the model."""
    ranks = found.ranks
    more = "".join(f", {name} {size}" for name, size in (("pp", ranks.pp), ("dp", ranks.dp)) if size > 1)
    return f"{ranks.gpus}× {found.gpu.name} (tp {ranks.tp}{more})"


def _users(count: int) -> str:
    return f"{count:,} user{'s' * (count != 1)}"


def _need(found: Fit) -> str:
    return f"{found.options.wanted:,} × {found.length:,} tokens"


def _beside(first: Row, found: Fit) -> str:
    """The low side of the range, and what sharing and the host's memory make of it."""
    low = first["low_num_seqs"]
    words = [] if low is None or low == found.sequences else [f"{low:,} on the low side"]
    if first.get("unshared_num_seqs") is not None:
        words.append(f"{first['unshared_num_seqs']:,} without the shared prefix of {found.options.shared_prefix:,}")
    if first.get("offload_num_seqs") is not None:
        words.append(f"{first['offload_num_seqs']:,} more in the host's memory")
    return "".join(f", {text}" for text in words)


def smaller_cache(found: Fit) -> list[str]:
    """Return a line on the users that a cache of 8 bits holds, with what was published of its quality; none if it has one."""
    change = small_cache(found) if found.fits else None
    if not change:
        return []
    cache = change.words[-1]
    return [f"{_users(change.sequences)} with {CACHES[cache]} ({loss_of('cache', cache)})"]


def _longest(first: Row, found: Fit) -> str:
    """The longest context of the sequences asked for, within what the model is made for."""
    if first["longest"] in ("no limit", f"{found.length:,}"):
        return ""
    users = "one alone" if found.options.wanted == 1 else f"{found.options.wanted:,} at once"
    return f"; {users} to {first['longest']} tokens"


def closest(found: Sequence[Fit]) -> int:
    """Return the index of the first answer if something fits, else of the answer that lacks the least."""
    if any(f.fits for f in found):
        return 0
    return max(range(len(found)), key=lambda at: (found[at].sequences, _headroom(found[at])))


def _headroom(found: Fit) -> int:
    return found.plan.pool(found.kv_budget) - found.needed.cache - found.shortage


def _lacking(rows: Sequence[Row], found: Sequence[Fit], typed: Mapping[str, str] | None) -> str:
    """What is missing where nothing fits, and what would mend it."""
    index = closest(found)
    nearest, advised = found[index], rows[index]["advice"]
    if typed and (as_flags := advice(nearest, typed[nearest.model.name], as_command=True)):
        advised = as_flags.said
    if len(found) > 1:
        none = f"none of these {len(found):,} configurations holds {_need(nearest)}"
        return f"{nearest.model.name}: {none}. The closest is {where(nearest)}: {advised}"
    verb = "does not" if nearest.options.wanted == 1 else "do not"
    return f"{nearest.model.name}: {_need(nearest)} {verb} fit on {where(nearest)}: {advised}"
