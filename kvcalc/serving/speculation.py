"""Speculative decoding: a draft proposes k tokens, one pass of the model verifies them.

A step yields (1 − a^(k+1))/(1 − a) tokens on average when each drafted token is accepted with
probability a, independently. Source: Leviathan et al. 2023, arXiv 2211.17192 §3.1 (equation 1). The
step takes k decode passes of the draft and one pass of k + 1 queries per sequence of the model.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.arithmetic import Num
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.feed_forward import Projections
from kvcalc.library.load import load_model, with_changes
from kvcalc.model.model import Model, check_vocabulary
from kvcalc.timing.deployment import TimedDeployment

MAX_BEST_DRAFTED = 16  # draft tokens per step up to which the best number is searched
ACCEPTANCE = 0.8  # default acceptance rate of a draft token
MAX_BATCH = 1 << 14  # sequences up to which speculation is checked for a loss


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Return the mean number of tokens that a sequence gains in one step of speculative decoding.

    It is (1 − a^(k+1)) / (1 − a) for acceptance a and k draft tokens, or k + 1 if a is 1.

    Args:
        acceptance: Probability, from 0 to 1, that a draft token is accepted.
        drafted: Draft tokens per step.
    """
    if acceptance == 1:
        return float(drafted + 1)
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


class Drafting(NamedTuple):
    """Settings of speculative decoding on a simulated server.

    Attributes:
        draft: The draft model on the GPUs of the target.
        drafted: Draft tokens per step.
        acceptance: Probability, from 0 to 1, that a draft token is accepted.
        seed: Seed of the random numbers that decide which draft tokens are accepted.
    """

    draft: TimedDeployment
    drafted: int
    acceptance: float
    seed: int = 0

    def draw_tokens(self, rng: Any, count: int) -> Any:
        """Return the number of tokens that each sequence gains in one step, as an array [count].

        A sequence gains the draft tokens before the first rejection, and one token of the
        verification.

        Args:
            rng: NumPy random generator.
            count: Number of sequences.
        """
        accepted = rng.random((count, self.drafted)) < self.acceptance
        return accepted.cumprod(axis=1).sum(axis=1) + 1


class StepTimes(NamedTuple):
    """Times of one step of speculative decoding. Times are arrays if the batch size is an array.

    Attributes:
        drafted: Draft tokens per step.
        plain_s: Seconds of a decode step without speculation.
        draft_s: Seconds of all drafting passes of the step.
        verify_s: Seconds of the pass in which the target verifies the draft tokens.
    """

    drafted: int
    plain_s: Any
    draft_s: Any
    verify_s: Any

    def per_token(self, acceptance: float) -> Any:
        """Return the mean seconds per output token of each sequence with speculation.

        The result is the step's time divided by the mean number of tokens that a sequence gains in
        it.

        Args:
            acceptance: Probability, from 0 to 1, that a draft token is accepted.
        """
        return (self.draft_s + self.verify_s) / expected_tokens(acceptance, self.drafted)

    def speedup(self, acceptance: float) -> Any:
        """Return the speed-up over decoding without speculation; below 1 if speculation is slower.

        Args:
            acceptance: Probability, from 0 to 1, that a draft token is accepted.
        """
        return self.plain_s / self.per_token(acceptance)


def verification(count: Num, drafted: Num, context: int) -> Batch:
    """Return the pass in which the target verifies the draft tokens of each sequence.

    The pass has drafted + 1 new tokens per sequence: the last accepted token and the draft tokens.

    Args:
        count: Number of sequences.
        drafted: Draft tokens per sequence.
        context: Tokens of each sequence, including the first of the new tokens.
    """
    return Batch((Sequences(count, drafted + 1, context - 1),))


def step_times(
    target: TimedDeployment,
    draft: TimedDeployment,
    context: int,
    batch_size: Num,
    drafted: int,
) -> StepTimes:
    """Return the times of one step of speculative decoding, and of one step without speculation.

    Args:
        target: Deployment of the model that verifies.
        draft: Deployment of the draft model.
        context: Tokens of each sequence.
        batch_size: Number of sequences; may be an array.
        drafted: Draft tokens per step.
    """
    decode = Batch.decode(context, batch_size)
    verify = verification(batch_size, drafted, context)
    return StepTimes(
        drafted=drafted,
        plain_s=target.seconds(decode),
        draft_s=drafted * draft.seconds(decode),
        verify_s=target.seconds(verify, all_positions=True),
    )


def best_drafted(
    target: TimedDeployment,
    draft: TimedDeployment,
    context: int,
    batch_size: int,
    acceptance: float,
) -> StepTimes:
    """Return the times of a step with the best number of draft tokens.

    Numbers from 1 to 16 are tried. The best number gives the least mean seconds per output token.

    Args:
        target: Deployment of the model that verifies.
        draft: Deployment of the draft model.
        context: Tokens of each sequence.
        batch_size: Number of sequences.
        acceptance: Probability, from 0 to 1, that a draft token is accepted.
    """
    numbers = range(1, MAX_BEST_DRAFTED + 1)
    drafted = float_array(numbers)
    tokens = float_array([expected_tokens(acceptance, number) for number in numbers])
    draft_s = draft.seconds(Batch.decode(context, batch_size))
    verify = verification(batch_size, drafted, context)
    verify_s = target.seconds(verify, all_positions=True)
    best = int(((draft_s * drafted + verify_s) / tokens).argmin()) + 1
    return step_times(target, draft, context, batch_size, best)


def break_even_batch(
    target: TimedDeployment,
    draft: TimedDeployment,
    context: int,
    drafted: int,
    acceptance: float,
) -> int | None:
    """Return the smallest batch size at which speculation is slower than plain decoding.

    Only powers of two are tried. None means that speculation is not slower up to 2^14 sequences.

    Args:
        target: Deployment of the model that verifies.
        draft: Deployment of the draft model.
        context: Tokens of each sequence.
        drafted: Draft tokens per step.
        acceptance: Probability, from 0 to 1, that a draft token is accepted.
    """
    batches = [1 << n for n in range(MAX_BATCH.bit_length())]
    times = step_times(target, draft, context, float_array(batches), drafted)
    speedups = times.speedup(acceptance)
    return next((n for n, speedup in zip(batches, speedups, strict=True) if speedup < 1), None)


def float_array(values: Sequence[float]) -> Any:
    """Return the numbers as a NumPy array of floats."""
    import numpy as np

    return np.array(values, dtype=float)


def draft_model(target: Model, name: str) -> Model:
    """Return the draft model for speculative decoding.

    Args:
        target: The model whose output the draft proposes.
        name: A model, `layers=N` (the first N layers of the target), or `mtp` (the
            multi-token-prediction layers of the target).

    Raises:
        UserError: The target lacks these layers, the draft has another vocabulary, or the draft
            cannot be loaded.
    """
    if name.startswith("layers="):
        small = with_changes(target, [name])
        if small.layers > target.layers:
            raise UserError(
                f"draft {name}: {target.name} has {target.layers} layers to take the first of"
            )
        return replace(small, name=f"{target.name}[{name}]")
    if name == "mtp":
        if not target.mtp:
            raise UserError(
                f"{target.name} declares no multi-token-prediction layers",
                "Draft with a model, or layers=N",
            )
        size = target.hidden_size
        joint = Projections(matrices={"mtp_projection": (2 * size, size)})
        return replace(
            target,
            name=f"{target.name}[mtp]",
            layers=target.mtp.layers,
            pattern=(target.mtp.kind,),
            extra=(*target.extra, joint),
            mtp=None,
        )
    draft = load_model(name)
    check_vocabulary(target, draft)
    return draft
