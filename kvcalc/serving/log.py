"""What a simulated server leaves behind: when each request got what, running sums over its passes, and a timeline."""

from typing import Any, NamedTuple

from kvcalc.serving.ledger import Grown

MOST_ROWS = 20_000


class PassRow(NamedTuple):
    """One line of the timeline: `passes` passes in a row over the same sequences, and the state at its end.

    tokens: of each pass. prefill_tokens: those of prompts. waiting: requests not admitted. The bytes are one GPU's.
    """

    rank: int
    start_s: float
    duration_s: float
    passes: int
    sequences: int
    tokens: int
    prefill_tokens: int
    waiting: int
    kv_allocated_bytes: int
    kv_stored_bytes: int


class Log:
    """Times of every request (arrays; NaN where it did not come to that), and sums over the passes, of constant size.

    slots, padded: token slots of the passes run, and those that hold padding. prefill_tokens counts recomputed ones too,
    decode_tokens those of sequences that decode, drafted ones too; found_tokens: of prompts, in a prefix cache. verified,
    yielded: verifications of drafts, each of one sequence, and the tokens that they made. The byte·seconds are integrals over
    time; so is in_system_s, the requests that have arrived and are not done. When the timeline is full every second row goes,
    again and again: `stride` says how many rows one now stands for.
    """

    def __init__(self, count: int, rank: int = 0) -> None:
        import numpy as np

        self.arrived, self.scheduled, self.first, self.finished = (np.full(count, np.nan) for _ in range(4))
        self.rejected = np.zeros(count, dtype=bool)
        self.rank, self.stride, self._seen = rank, 1, 0
        self.rows: list[PassRow] = []
        self.passes = self.slots = self.padded = self.prefill_tokens = self.decode_tokens = 0
        self.verified = self.yielded = self.found_tokens = 0
        self.preemptions = self.recomputed_tokens = self.swapped_bytes = self.peak = self.largest = 0
        self.allocated_byte_s = self.stored_byte_s = self.busy_s = self.sequences_s = self.in_system_s = 0.0

    def passed(
        self, start: float, seconds: Any, sequences: int, tokens: int, prompt: int, waiting: int, allocated: Any, stored: Any,
        padded: int = 0,
    ) -> None:  # fmt: skip
        """Note passes in a row: `seconds`, and bytes `allocated` and `stored`, are arrays with an element a pass.

        padded: slots of padding in all of these passes together, in those of prompts where there are any.
        """
        ends = int(allocated[-1]), int(stored[-1]), int(allocated.max())
        spent, lived = seconds * allocated, seconds * stored  # summed by NumPy: BLAS rounds by its number of threads
        grown = Grown(*ends, float(spent.sum()), float(lived.sum()))
        self.ran(start, float(seconds.sum()), len(seconds), sequences, tokens, prompt, waiting, grown, padded)

    def ran(
        self, start: float, span: float, many: int, sequences: int, tokens: int, prompt: int, waiting: int, grown: Grown,
        padded: int = 0,
    ) -> None:  # fmt: skip
        """As `passed`, of `many` passes that took `span` seconds together."""
        self.passes += many
        self.slots += tokens * many
        self.padded += padded
        self.prefill_tokens += prompt - padded if prompt else 0
        self.decode_tokens += (tokens - prompt) * many - (0 if prompt else padded)
        self.busy_s += span
        self.sequences_s += sequences * span
        self.largest = max(self.largest, sequences)
        self.peak = max(self.peak, grown.peak)
        self.allocated_byte_s += grown.allocated_byte_s
        self.stored_byte_s += grown.stored_byte_s
        if self._seen % self.stride == 0:
            row = (start, span, many, sequences, tokens, prompt, waiting, grown.allocated, grown.stored)
            self._note(PassRow(self.rank, *row))
        self._seen += 1

    def _note(self, row: PassRow) -> None:
        self.rows.append(row)
        if len(self.rows) > MOST_ROWS:
            self.rows = self.rows[::2]
            self.stride *= 2
