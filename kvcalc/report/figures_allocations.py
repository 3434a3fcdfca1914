"""`fit --allocations` as a picture: how memory lies at the end under three allocators, and what the last request is told."""

from kvcalc.capacity.allocations import Played
from kvcalc.report.allocations import NAMES
from kvcalc.report.chart import Axis, Chart, Series

PARTS = ("holds tokens", "reserved, holds nothing", "free for one request", "free, out of its reach")


def allocations_chart(played: Played) -> Chart:
    """Tokens of memory that hold something, are reserved for nothing, can be given to one request, and cannot.

    Out of reach: what makes no whole slot or page, and holes beside the largest.
    """
    last = played.records[-1]
    memory, slots, pages = last["memory_tokens"], played.slots, played.pages
    reserved = {
        "contiguous": slots.longest * len(slots.living),
        "first_fit": memory - last["first_fit_free_tokens"],
        "paged": pages.block * sum(map(len, pages.tables.values())),
    }
    held = {name: sum(played.held[name].values()) for name in ("contiguous", "paged")}
    held["first_fit"] = reserved["first_fit"]
    free = {
        "contiguous": min(slots.longest, last["contiguous_free_tokens"]),
        "first_fit": last["first_fit_largest_hole"],
        "paged": last["paged_free_tokens"],
    }
    rows = [(held[n], reserved[n] - held[n], free[n], memory - reserved[n] - free[n]) for n in NAMES]
    asked = next((r for r in reversed(played.records) if r["tokens"] is not None), None)
    texts = tuple(f"{asked['request']}: {'yes' if asked[n] else 'no'}" for n in NAMES) if asked else ()
    series = [Series(part, (), tuple(float(row[at]) for row in rows), "bar") for at, part in enumerate(PARTS)]
    series[-1] = series[-1]._replace(labels=texts)
    axis = Axis("tokens", log=False, tick=lambda v: f"{v:,.0f}")
    names = f"slots of {slots.longest:,}", "pieces, first fit", f"pages of {pages.block:,}"
    about = f"{memory:,} tokens of memory after {last['request']!r}, and what each allocator says to the last request"
    return Chart("What three allocators make of the same requests", about, axis, axis, tuple(series), names)
