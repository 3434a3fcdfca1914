"""A written sequence of allocations and releases, played to three allocators: contiguous slots, first fit, and pages.

Source of the three: Kwon et al. 2023, arXiv 2309.06180 §3.1 (slots of the longest length, pieces) and §4.1–4.3 (blocks and
their table). Blocks are given from the head of a queue that begins in order of their numbers; those released join its end, the
last of a sequence first (vLLM, `v1/core/kv_cache_utils.py`, FreeKVCacheBlockQueue). An entry of a block table is an int32
(`v1/worker/block_table.py`).
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvcalc.capacity.holes import Holes
from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.units import parse_tokens

MOST_STEPS, MOST_FILE, MOST_SLOTS = 10_000, 1 << 20, 1 << 27
ENTRY_BYTES = 4
FORMS = "Write NAME TOKENS, free NAME, ask TOKENS, or memory TOKENS first"


class Step(NamedTuple):
    """One line of the file: `tokens` for the sequence `name`, 0 to release it; a question where the name is ''."""

    line: int
    name: str
    tokens: int

    @property
    def text(self) -> str:
        if not self.name:
            return f"ask {self.tokens}"
        return f"{self.name} {self.tokens}" if self.tokens else f"free {self.name}"


class Script(NamedTuple):
    """steps, and the tokens of memory that the file names, or 0."""

    steps: tuple[Step, ...]
    memory: int


class Allocator(Protocol):
    """Token slots that are given and taken back. `give` grows a sequence that lives, where it stands."""

    def could(self, tokens: int) -> bool:
        """Whether a new sequence of so many tokens would be given room now."""

    def give(self, name: str, tokens: int) -> bool:
        """Room for so many tokens in all; nothing changes where there is none."""

    def take(self, name: str) -> None:
        """A sequence ends; one that was never given room leaves none behind."""

    @property
    def free(self) -> int:
        """Token slots that nobody holds."""


class Slots:
    """A slot of the longest length for each sequence, whatever it holds."""

    def __init__(self, memory: int, longest: int) -> None:
        self.longest, self.number = longest, memory // longest
        self.living: set[str] = set()

    def could(self, tokens: int) -> bool:
        return tokens <= self.longest and len(self.living) < self.number

    def give(self, name: str, tokens: int) -> bool:
        fits = tokens <= self.longest if name in self.living else self.could(tokens)
        if fits:
            self.living.add(name)
        return fits

    def take(self, name: str) -> None:
        self.living.discard(name)

    @property
    def free(self) -> int:
        return (self.number - len(self.living)) * self.longest


class FirstFit:
    """Pieces of exactly the tokens asked for, each in the first hole that holds it; one grows into the hole behind it alone."""

    def __init__(self, memory: int) -> None:
        self.memory, self._left = memory, Holes(memory)
        self.pieces: dict[str, tuple[int, int]] = {}  # name: (start, size)

    def holes(self) -> list[tuple[int, int]]:
        """(start, size) of what is free between the pieces, in order."""
        found, at = [], 0
        for start, size in [*sorted(self.pieces.values()), (self.memory, 0)]:
            found += [(at, start - at)] if start > at else []
            at = start + size
        return found

    def could(self, tokens: int) -> bool:
        return tokens <= self._left.largest

    def give(self, name: str, tokens: int) -> bool:
        if name in self.pieces:
            start, size = self.pieces[name]
            fits = tokens == size or self._left.take_at(start + size, tokens - size)
        else:
            start = self._left.take(tokens)
            fits = start >= 0
        if fits:
            self.pieces[name] = (start, tokens)
        return fits

    def take(self, name: str) -> None:
        if name in self.pieces:
            self._left.give(*self.pieces.pop(name))

    @property
    def free(self) -> int:
        return self._left.free

    @property
    def largest(self) -> int:
        """Tokens of the largest hole."""
        return self._left.largest


class Pages:
    """Whole blocks from a queue, wherever they lie; `tables` is each sequence's physical block by logical one."""

    def __init__(self, memory: int, block: int) -> None:
        self.memory, self.block, self.queue = memory, block, deque(range(memory // block))
        self.tables: dict[str, list[int]] = {}

    def could(self, tokens: int) -> bool:
        return -(-tokens // self.block) <= len(self.queue)

    def give(self, name: str, tokens: int) -> bool:
        table = self.tables.get(name, [])
        more = -(-tokens // self.block) - len(table)
        if more > len(self.queue):
            return False
        self.tables[name] = table + [self.queue.popleft() for _ in range(more)]
        return True

    def take(self, name: str) -> None:
        self.queue.extend(reversed(self.tables.pop(name, [])))

    @property
    def free(self) -> int:
        return len(self.queue) * self.block


class Played(NamedTuple):
    """What came of a script: a record a step, the allocators as they end, and the tokens that each holds of a sequence."""

    records: list[dict[str, Any]]
    slots: Slots
    first_fit: FirstFit
    pages: Pages
    held: dict[str, dict[str, int]]


def play(steps: Sequence[Step], memory: int, longest: int, block: int) -> Played:
    """Each step to each allocator, of `memory` token slots. Raises UserError where the memory is too large to be listed."""
    if memory > MOST_SLOTS:
        raise UserError(f"{memory:,} token slots are too many to play allocations in", hint="Begin the file with memory TOKENS")
    slots, pieces, pages = Slots(memory, longest), FirstFit(memory), Pages(memory, block)
    records = []
    held: dict[str, dict[str, int]] = {"contiguous": {}, "first_fit": {}, "paged": {}}
    for step in steps:
        record: dict[str, Any] = {"line": step.line, "request": step.text, "tokens": step.tokens or None, "memory_tokens": memory}
        for name, allocator in (("contiguous", slots), ("first_fit", pieces), ("paged", pages)):
            granted = _given(allocator, step)
            record |= {name: granted, f"{name}_free_tokens": allocator.free}
            if granted and step.name:
                held[name][step.name] = step.tokens
            elif granted is None:
                held[name].pop(step.name, None)
        records.append(
            record
            | {"contiguous_free_slots": slots.number - len(slots.living), "first_fit_largest_hole": pieces.largest}
            | {"paged_free_blocks": len(pages.queue), "block_table": pages.tables.get(step.name)}
        )
    return Played(records, slots, pieces, pages, held)


def _given(allocator: Allocator, step: Step) -> bool | None:
    """Whether an allocation or a question was granted; None for a release."""
    if not step.name:
        return allocator.could(step.tokens)
    if step.tokens:
        return allocator.give(step.name, step.tokens)
    allocator.take(step.name)
    return None


def read_script(text: str) -> Script:
    """A file of `NAME TOKENS` (a sequence, or one that grows), `free NAME`, `ask TOKENS`, and first `memory TOKENS`.

    Blank lines and what follows a # are passed over. Raises UserError naming the line.
    """
    living: dict[str, int] = {}
    steps: list[Step] = []
    memory = 0
    for number, line in enumerate(read_text(Path(text), MOST_FILE).splitlines(), 1):
        words = line.partition("#")[0].split()
        try:
            if len(words) == 2 and words[0] == "memory" and not steps and not memory:
                memory = parse_tokens(words[1], "memory")
            elif words:
                steps.append(_step(number, words, living))
        except UserError as error:
            raise UserError(error.what, f"{text}, line {number}", error.hint) from None
    if not 0 < len(steps) <= MOST_STEPS:
        raise UserError(f"holds {len(steps):,} steps, not 1 to {MOST_STEPS:,}", text, FORMS)
    return Script(tuple(steps), memory)


def _step(number: int, words: list[str], living: dict[str, int]) -> Step:
    """One line; `living` holds the tokens of every sequence that was asked for and not released."""
    if len(words) != 2 or words[0] == "memory":
        raise UserError(f"{' '.join(words)!r} is no step", hint=FORMS)
    first, second = words
    if first == "free":
        if living.pop(second, None) is None:
            raise UserError(f"{second!r} has no tokens to release")
        return Step(number, second, 0)
    tokens = parse_tokens(second, "tokens")
    if first == "ask":
        return Step(number, "", tokens)
    if tokens < living.get(first, 0):
        raise UserError(
            f"{first!r} has {living[first]:,} tokens and cannot shrink to {tokens:,}", hint=f"Release it: free {first}"
        )
    living[first] = tokens
    return Step(number, first, tokens)
