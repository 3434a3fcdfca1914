"""The log of a simulated server: times of each request, sums over its passes, and a timeline."""

from typing import Any, NamedTuple

from kvcalc.serving.ledger import Grown

MOST_ROWS = 20_000


class PassRow(NamedTuple):
    """One row of the timeline: consecutive passes over the same sequences, and the state after them.

    Attributes:
        passes: Number of passes.
        tokens: Tokens of each pass.
        prefill_tokens: Prompt tokens of each pass.
        waiting: Requests that are not admitted.
        kv_allocated_bytes: Allocated bytes of one GPU.
        kv_stored_bytes: Stored bytes of one GPU.
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
    """Times of every request, as arrays, and sums over the passes, of constant size.

    A time is NaN if a request did not reach that state. If the timeline is full, every second row is
    dropped.

    Attributes:
        slots: Token slots of the passes run.
        padded: Token slots that contain padding.
        prefill_tokens: Prompt tokens, including recomputed tokens.
        decode_tokens: Tokens of decoding sequences, including draft tokens.
        found_tokens: Prompt tokens found in a prefix cache.
        verified: Verifications of drafts, counted per sequence.
        yielded: Tokens that the verifications produced.
        allocated_byte_s: Allocated bytes, integrated over time.
        stored_byte_s: Stored bytes, integrated over time.
        in_system_s: Number of requests that have arrived and are not done, integrated over time.
        stride: Number of rows that one row of the timeline represents.
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
        """Record consecutive passes.

        Args:
            seconds: Seconds, as an array with one element per pass.
            allocated: Allocated bytes, as an array with one element per pass.
            stored: Stored bytes, as an array with one element per pass.
            padded: Padding slots of all passes together, in prompts if the passes have prompts.
        """
        ends = int(allocated[-1]), int(stored[-1]), int(allocated.max())
        spent, lived = seconds * allocated, seconds * stored  # summed by NumPy: BLAS rounds by its number of threads
        grown = Grown(*ends, float(spent.sum()), float(lived.sum()))
        self.ran(start, float(seconds.sum()), len(seconds), sequences, tokens, prompt, waiting, grown, padded)

    def ran(
        self, start: float, span: float, many: int, sequences: int, tokens: int, prompt: int, waiting: int, grown: Grown,
        padded: int = 0,
    ) -> None:  # fmt: skip
        """Record `many` consecutive passes that took `span` seconds together. See `passed`."""
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
