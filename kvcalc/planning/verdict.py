"""What a diagnosis says: one sentence of what took the memory, one of what to change, and its records."""

from typing import Any

from kvcalc.capacity import Fit
from kvcalc.errors import printable
from kvcalc.planning.advice import Change, Need, changes, limited, shorter
from kvcalc.planning.diagnosis import SHORT, Diagnosis, as_logged
from kvcalc.storage.quality import UNKNOWN
from kvcalc.units import format_bytes

_ENDED = {
    "no_blocks": "nothing is left for the cache",
    "too_long": "not one sequence of the longest length fits",
    "occupied": "less is free than the engine's share",
    "out_of_memory": "an allocation failed",
    "weights": "the weights do not fit",
}


_NO_PARTS = ("memory of the GPU", "taken before the start", "share that the engine takes", "cache", SHORT, "left free")


class Verdict:
    """The sentences and records of a diagnosis, and the changes that mend it, where something was asked that it does not hold."""

    def __init__(self, found: Diagnosis, users: int = 0, context: int = 0) -> None:
        self.found, self.asked = found, bool(users or context)
        self.need = Need(max(1, users), context or found.length)
        self.logged: Fit = as_logged(found, users=self.need.users, max_model_len=self.need.tokens)
        self.holds = self.logged.fits and (not found.boot.failure or (self.asked and found.boot.started))
        self.changes: list[Change] = [] if self.holds else changes(found, self.need)
        self.shorter = 0 if self.holds or self.asked else shorter(found)

    def taken(self) -> str:
        """What took the memory."""
        found, boot = self.found, self.found.boot
        version = f" {printable(boot.version, 40)}" if boot.version else ""
        head = (
            f"{found.predicted.model.name} on {found.predicted.ranks.gpus}× {found.deployment.gpu.name}, {boot.engine}{version}: "
        )
        failure = boot.failure
        if failure and failure.kind == "occupied":
            held = failure.figures["total"] - failure.figures["free"]
            words = [format_bytes(size) for size in (held, failure.figures["free"], failure.figures["share"])]
            return "{}{} were in use before the start, so {} are free where the share is {}".format(head, *words)
        parts = [
            f"{t.name} {format_bytes(t.logged)}"
            for t in found.terms
            if t.name not in _NO_PARTS and not t.name.startswith("in the host") and t.logged is not None and t.logged > 0
        ]  # fmt: skip
        cache, share = found.logged("cache"), found.logged("share that the engine takes")
        of = f"of {format_bytes(share)} " if share else ""
        took = f"{of}{', '.join(parts)}" if parts else "nothing of the memory is in the log"
        left = "" if cache is None else f"; {format_bytes(cache)} are left for the cache" if boot.engine != "llama.cpp" else (
            f"; the cache takes {format_bytes(cache)}"
        )  # fmt: skip
        if short := found.logged(SHORT):
            left = f"; that is {format_bytes(short)} short of any cache"
        ended = f"; it ended as {_ENDED[failure.kind]}" if failure else ""
        return f"{head}{took}{left}{ended}"

    def holding(self) -> str:
        """How many conversations it holds, as logged."""
        boot, found = self.found.boot, self.logged
        tokens = boot.counts.get("tokens") or boot.counts.get("cells")
        words = f"{tokens:,} {'cells' if boot.engine == 'llama.cpp' else 'tokens'} in the cache, " if tokens else ""
        each = f"{found.sequences:,} conversation{'s' * (found.sequences != 1)} of {self.need.tokens:,} tokens"
        return f"{words}{each} as logged, {self.predicted_sequences:,} by the rules"

    @property
    def predicted_sequences(self) -> int:
        plain = self.found.predicted
        return plain.plan.most_sequences(plain.budget_at(plain.end), self.need.tokens) * plain.ranks.dp

    def mending(self) -> str:
        """What to change, '' where nothing has to be."""
        if self.holds:
            return ""
        need = f"{self.need.users:,} × {self.need.tokens:,} tokens"
        if self.changes:
            said = [c.flags + (f" ({c.cost})" if c.cost else "") for c in self.changes]
            text = f"{need} {'fit' if self.need.users > 1 else 'fits'} with {', or '.join(said)}"
        else:
            text = f"no change of one or two flags holds {need} on this GPU"
        if self.shorter:
            text += f"; or with {limited(self.found.options, self.shorter)}: longer prompts are then refused, {UNKNOWN}"
        failure = self.found.boot.failure
        if failure and failure.kind == "occupied":
            text = f"stop what holds the memory, or {text}"
        return text

    def records(self, log: str = "", number: int = 1) -> list[dict[str, Any]]:
        """One record a term, and last what fits: `advice` is its one nested list."""
        found, boot = self.found, self.found.boot
        common: dict[str, Any] = {
            "log": log,
            "boot": number,
            "engine": boot.engine,
            "engine_version": printable(boot.version, 40) or None,
            "model": found.predicted.model.name,
            "gpu": found.deployment.gpu.name,
            "gpus": found.predicted.ranks.gpus,
        }
        empty: dict[str, Any] = dict.fromkeys(
            ("fits", "failure", "tokens", "max_num_seqs", "command", "taken", "change", "advice")
        )
        rows: list[dict[str, Any]] = [
            common
            | {
                "term": t.name,
                "logged_bytes": t.logged,
                "predicted_bytes": t.predicted,
                "difference_bytes": _less(t.logged, t.predicted),
            }
            | empty
            for t in found.terms
        ]
        cache = next((t for t in found.terms if t.name == "cache"), None)
        logged, predicted = (cache.logged, cache.predicted) if cache else (None, None)
        last = {
            "term": "what fits",
            "logged_bytes": logged,
            "predicted_bytes": predicted,
            "difference_bytes": _less(logged, predicted),
            "fits": self.holds,
            "failure": boot.failure.kind if boot.failure else None,
            "tokens": boot.counts.get("tokens"),
            "max_num_seqs": self.logged.sequences,
            "command": self._command(),
            "taken": self.taken(),
            "change": self.mending() or None,
            "advice": [c._asdict() for c in self.changes],
        }
        return [*rows, common | last]

    def _command(self) -> str | None:
        from kvcalc.capacity.commands import command_of

        written = command_of(self.found.deployment, self.found.options, self.found.command.named)
        return written.line if written else None


def _less(logged: int | None, predicted: int | None) -> int | None:
    return None if logged is None or predicted is None else logged - predicted
