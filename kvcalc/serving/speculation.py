"""Speculative decoding: a draft proposes k tokens, one pass of the model verifies them.

A step yields (1 − a^(k+1))/(1 − a) tokens on average when each drafted token is accepted with
probability a, independently. Source: Leviathan et al. 2023, arXiv 2211.17192 §3.1 (equation 1). The
step takes k decode passes of the draft and one pass of k + 1 queries per sequence of the model.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.arithmetic import Num
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.feed_forward import Projections
from kvcalc.library.load import load_model, with_changes
from kvcalc.model.model import Model, check_vocabulary
from kvcalc.question.serving_options import LatencyOptions, ServerSettings
from kvcalc.timing.deployment import TimedDeployment

MAX_BEST_DRAFTED = 16  # draft tokens per step up to which the best number is searched
ACCEPTANCE = 0.8  # default acceptance rate of a draft token
MAX_BATCH = 1 << 14  # sequences up to which speculation is checked for a loss


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Return the mean number of tokens that a sequence gains per step of speculative decoding.

    It is (1 − a^(k+1)) / (1 − a) for acceptance a and k draft tokens, or k + 1 if a is 1. It
    includes the one token that the target itself generates. Example: with a = 0.5 and k = 1 it is
    1.5.

    Args:
        acceptance: Probability, from 0 to 1, that a draft token is accepted if all earlier ones of
            the step are.
        drafted: Draft tokens per sequence and step, k.
    """
    if acceptance == 1:
        return float(drafted + 1)
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def requested_speculation(
    model: Model, options: LatencyOptions | ServerSettings
) -> tuple[int, float]:
    """Return the draft tokens per step, 0 for the fastest number, and their acceptance rate.

    Multi-token prediction drafts a token per prediction layer by default. An acceptance rate above
    1 is the mean number of tokens per step. Example: 2.8 with 4 draft tokens is a rate of 0.705.

    Args:
        model: The target model.
        options: Options with the draft.

    Raises:
        UserError: The mean is above the draft tokens + 1, or their number is unknown.
    """
    drafted, accepted = options.num_speculative_tokens, options.acceptance_rate
    if options.draft == "mtp" and model.mtp:
        drafted = drafted or model.mtp.layers
    if accepted is None:
        return drafted, ACCEPTANCE
    if accepted > drafted + 1:
        raise UserError(
            f"{accepted} tokens per step need more than {drafted} draft tokens",
            "Add --num-speculative-tokens",
        )
    if accepted > 1:
        steps = range(100_000)  # of the rate
        accepted = bisect_left(steps, accepted, key=lambda n: expected_tokens(n / 1e5, drafted))
        accepted /= 1e5
    return drafted, accepted


class Drafting(NamedTuple):
    """Settings of speculative decoding on a simulated server.

    Attributes:
        draft: The draft model, on the same GPUs as the target model that verifies its tokens.
        drafted: Draft tokens per sequence and step.
        acceptance: Probability, from 0 to 1, that a draft token is accepted if all earlier ones of
            the step are.
        seed: Seed of the random numbers that decide which draft tokens are accepted.
    """

    draft: TimedDeployment
    drafted: int
    acceptance: float
    seed: int = 0

    def draw_tokens(self, rng: Any, count: int) -> Any:
        """Return the random numbers of tokens that sequences gain in one step, as an array [count].

        A sequence gains the draft tokens before the first rejected one, and one token that the
        target generates.

        Args:
            rng: NumPy random generator.
            count: Number of decoding sequences.
        """
        accepted = rng.random((count, self.drafted)) < self.acceptance
        return accepted.cumprod(axis=1).sum(axis=1) + 1


class StepTimes(NamedTuple):
    """Times of one decode step of a batch, with and without speculative decoding.

    Times are floats, or arrays if they are for several batch sizes.

    Attributes:
        drafted: Draft tokens per sequence and step.
        plain_s: Seconds of a decode step without speculation.
        draft_s: Seconds of all forward passes of the draft model in one step.
        verify_s: Seconds of the forward pass in which the target verifies the draft tokens.
    """

    drafted: int
    plain_s: Any
    draft_s: Any
    verify_s: Any

    def per_token(self, acceptance: float) -> Any:
        """Return the mean seconds per output token of a sequence with speculative decoding.

        The result is the step's time divided by the mean number of tokens that a sequence gains in
        it.

        Args:
            acceptance: Probability, from 0 to 1, that a draft token is accepted if all earlier ones
                of the step are.
        """
        return (self.draft_s + self.verify_s) / expected_tokens(acceptance, self.drafted)

    def speedup(self, acceptance: float) -> Any:
        """Return the time per token without speculation ÷ that with it; below 1 if it is slower.

        Args:
            acceptance: Probability, from 0 to 1, that a draft token is accepted if all earlier ones
                of the step are.
        """
        return self.plain_s / self.per_token(acceptance)


def verification(count: Num, drafted: Num, context: int) -> Batch:
    """Return the forward pass in which the target verifies the draft tokens, as a `Batch`.

    The pass has drafted + 1 new tokens per sequence: the last accepted token and the draft tokens.

    Args:
        count: Number of sequences; may be an array, to describe several passes.
        drafted: Draft tokens per sequence; may be an array.
        context: Tokens of each sequence, including the last accepted token but not the draft
            tokens.
    """
    return Batch((Sequences(count, drafted + 1, context - 1),))


def step_times(
    target: TimedDeployment, draft: TimedDeployment, context: int, batch_size: Num, drafted: int
) -> StepTimes:
    """Return the times of one decode step with and without speculative decoding.

    Args:
        target: Deployment of the model that verifies the draft tokens.
        draft: Deployment of the draft model on the same GPUs.
        context: Tokens of each sequence, without the draft tokens.
        batch_size: Number of sequences. With an array, the times are arrays.
        drafted: Draft tokens per sequence and step.
    """
    decode = Batch.decode(context, batch_size)
    return StepTimes(
        drafted=drafted,
        plain_s=target.seconds(decode),
        draft_s=drafted * draft.seconds(decode),
        verify_s=target.seconds(verification(batch_size, drafted, context), all_positions=True),
    )


def best_drafted(
    target: TimedDeployment,
    draft: TimedDeployment,
    context: int,
    batch_size: int,
    acceptance: float,
) -> StepTimes:
    """Return the times of a step of speculative decoding with the best number of draft tokens.

    Numbers from 1 to 16 are tried. The best number gives the least mean seconds per output token.

    Args:
        target: Deployment of the model that verifies the draft tokens.
        draft: Deployment of the draft model on the same GPUs.
        context: Tokens of each sequence, without the draft tokens.
        batch_size: Number of sequences.
        acceptance: Probability, from 0 to 1, that a draft token is accepted if all earlier ones of
            the step are.

    Returns:
        The times; their field `drafted` is the best number of draft tokens per step.
    """
    numbers = range(1, MAX_BEST_DRAFTED + 1)
    drafted = float_array(numbers)
    tokens = float_array([expected_tokens(acceptance, number) for number in numbers])
    draft_s = draft.seconds(Batch.decode(context, batch_size))
    verify_s = target.seconds(verification(batch_size, drafted, context), all_positions=True)
    best = int(((draft_s * drafted + verify_s) / tokens).argmin()) + 1
    return step_times(target, draft, context, batch_size, best)


def break_even_batch(
    target: TimedDeployment,
    draft: TimedDeployment,
    context: int,
    drafted: int,
    acceptance: float,
) -> int | None:
    """Return the smallest batch size at which speculative decoding is slower than plain decoding.

    Only powers of two are tried. None means that speculation is not slower up to 2^14 sequences.

    Args:
        target: Deployment of the model that verifies the draft tokens.
        draft: Deployment of the draft model on the same GPUs.
        context: Tokens of each sequence, without the draft tokens.
        drafted: Draft tokens per sequence and step.
        acceptance: Probability, from 0 to 1, that a draft token is accepted if all earlier ones of
            the step are.
    """
    batches = [1 << n for n in range(MAX_BATCH.bit_length())]
    times = step_times(target, draft, context, float_array(batches), drafted)
    return next(
        (n for n, speedup in zip(batches, times.speedup(acceptance)) if speedup < 1), None
    )


def float_array(values: Sequence[float]) -> Any:
    """Return the numbers as a NumPy array of floats."""
    import numpy as np

    return np.array(values, dtype=float)


def draft_model(target: Model, name: str) -> Model:
    """Load the model that drafts tokens for a target model in speculative decoding.

    Args:
        target: The model whose output the draft proposes.
        name: Name of a model, `layers=N` (the first N layers of the target as a draft), `eagle`
            (one layer), or `mtp` (the multi-token-prediction layers of the target).

    Raises:
        UserError: The target lacks these layers, the draft has another vocabulary, or the draft
            cannot be loaded.
    """
    if name in ("eagle", "eagle3"):
        name = "layers=1"
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
