"""What to generate, in which ways: the passes of every step, their operators, and the bytes of the caches."""

from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.measure.cache import DTYPES, LayerCache
from kvcalc.measure.device import Machine
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.modes import Mode
from kvcalc.model.memory import cache_size
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.units import format_bytes

FEW_ROWS = (1, 8, 32)  # that products are sampled at whatever is asked; 32 are a block of torch's fused attention
GRID = 5  # and so many numbers of rows from the prompt's to those of the last step


class Request(NamedTuple):
    """What to generate: `new_tokens` behind a random prompt of `prompt_len`, `batch_size` at once, in each of `modes`.

    variant: what the model is called. block_size: of a paged cache; 0 for a contiguous one.
    """

    model: Model
    prompt_len: int
    new_tokens: int
    batch_size: int
    dtype: str
    modes: tuple[Mode, ...] = (Mode("cached"), Mode("uncached"))
    variant: str = ""
    block_size: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_len + self.new_tokens

    @property
    def steps(self) -> int:
        """Passes of all modes together."""
        return self.new_tokens * len(self.modes)

    def batch(self, mode: Mode, step: int) -> Batch:
        """The pass of a step: the prompt, then one token each, or all of them."""
        length = self.prompt_len + step
        return Batch.decode(length, self.batch_size) if mode.caches and step else Batch.prefill(length, self.batch_size)

    def operators(self, mode: Mode, step: int) -> tuple[Operator, ...]:
        """Those of a step; MLA absorbed for a single token and expanded for several, as the layers are."""
        batch = self.batch(mode, step)
        form = "absorbed" if batch.groups[0].new == 1 else "expanded"
        return forward(self.model, batch, Precision(self.dtype), mla_form=form, all_positions=mode.head == "all")

    def predicted_bytes(self, mode: Mode) -> int:
        """Of the cache at the end: allocated for all tokens, or grown to those but the last, which is never passed."""
        if not mode.caches:
            return 0
        grown = mode.name == "cat"
        size = cache_size(self.model, self.tokens - grown, self.batch_size, Precision(self.dtype), self.block_size or 16)
        return size.allocated if self.block_size and not grown else size.stored

    def caches(self, decoder: Decoder, mode: Mode) -> list[LayerCache] | None:
        if not mode.caches:
            return None
        grown = mode.name == "cat"
        return decoder.caches(self.batch_size, self.tokens, 0 if grown else self.block_size, grown=grown)

    @property
    def rows(self) -> list[int]:
        """Of the products whose rates predict the steps."""
        first, last = self.prompt_len, self.tokens - 1
        between = [first + (last - first) * i // (GRID - 1) for i in range(GRID)]
        return sorted({*FEW_ROWS, self.batch_size, *(self.batch_size * tokens for tokens in between)})


def check(request: Request, machine: Machine) -> None:
    """Raises UserError where the decoder cannot take so many positions, or does not fit the machine's memory."""
    model, element = request.model, DTYPES[request.dtype].itemsize
    if model.position_embeddings and request.tokens - 1 > model.position_embeddings:
        raise UserError(f"{model.name} has {model.position_embeddings:,} positions, and {request.tokens - 1:,} are asked for")
    logits = request.batch_size * model.vocab_size * (request.tokens if any(m.head == "all" for m in request.modes) else 1)
    work = 2 * logits + 8 * request.batch_size * request.tokens * model.hidden_size
    caches = sum(2 * request.predicted_bytes(mode) for mode in request.modes)
    needed = (model.parameters + work) * element + caches
    if needed > machine.free_bytes():
        raise UserError(f"{model.name} needs {format_bytes(needed)}, and {format_bytes(machine.free_bytes())} can be used")
