"""The event-by-event scheduler: against a scheduler pass by pass, engines' orders by hand, and tables against whole passes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import run_plainly
from servers import HandClock, HandTimer, asked, byte_pool

from kvcalc import Batch, Parallelism, Sequences, load_gpu, load_model
from kvcalc.serving.batching import Continuous, Decoding, Limits, Scheduling, ServerSetup
from kvcalc.serving.cache_accounting import Log, Pool
from kvcalc.serving.requests import ArrivalQueue, Clients, Requests
from kvcalc.serving.simulation import simulate
from kvcalc.serving.step_timers import InterpolatedStepTimer, StepTimer, driving_quantity, geometric_points
from kvcalc.timing.deployment import TimedDeployment

TIMES = ("arrived", "scheduled", "first", "finished")
SUMS = (
    "passes", "slots", "prefill_tokens", "padded", "preemptions", "recomputed_tokens", "peak", "largest",
    "allocated_byte_s", "stored_byte_s", "busy_s", "sequences_s",
)  # fmt: skip


def ran(plain: bool, load: Requests, pool: Pool, limits: Limits, clients: int) -> Log:
    door = ArrivalQueue(load, pool, Log(len(load)), Clients(clients))
    if plain:
        run_plainly(door, pool, limits, door.log, lambda tokens: 0.5 + 0.01 * tokens)
        return door.log
    server = Continuous(door, ServerSetup(pool, HandTimer(HandClock(0.5, 0.01)), limits))
    while server.run():
        pass
    return door.log


loads = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 2.0, 7.7, 21.0]), st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=25
).map(sorted)


@settings(max_examples=40)
@given(loads, st.integers(66, 160), st.integers(1, 8), st.integers(1, 6), st.integers(6, 64), st.integers(0, 4))
def test_events_are_the_passes_one_by_one(
    rows: list[tuple[float, int, int]], budget: int, block: int, seats: int, tokens: int, clients: int
) -> None:
    """Times and sums equal a scheduler that visits all sequences at every pass, including preemptions."""
    load, pool = asked(*rows), byte_pool(budget, block, most=200)
    limits = Limits(seats, tokens)
    one, other = (ran(plain, load, pool, limits, clients) for plain in (True, False))
    for name in TIMES:
        assert getattr(other, name) == pytest.approx(getattr(one, name), abs=1e-9, nan_ok=True), name
    for name in SUMS:
        assert getattr(other, name) == pytest.approx(getattr(one, name)), name


def served(how: Scheduling, *rows: tuple[float, int, int], pool: Pool | None = None, **limits: int) -> Log:
    setup = ServerSetup(pool or byte_pool(), HandTimer(HandClock(1.0)), Limits(**limits), how)
    return simulate(asked(*rows), setup).logs[0]


def test_prompts_first_hold_up_the_decodes() -> None:
    """A pass takes a second. The second prompt, at 1.5, has the pass from 2 to 3 to itself, so the first answer
    ends a second later."""
    rows = ((0.0, 5, 4), (1.5, 5, 2))
    mixed, first = served(Scheduling(), *rows), served(Scheduling(decodes_wait=True), *rows)
    assert mixed.finished.tolist() == [4, 4]
    assert first.first.tolist() == [1, 3]
    assert first.finished.tolist() == [5, 4]
    assert [(r.tokens, r.prefill_tokens) for r in first.rows] == [(5, 5), (1, 0), (5, 5), (2, 0), (1, 0)]


@given(loads, st.integers(66, 160), st.integers(1, 6), st.booleans())
def test_passes_in_a_row_are_as_single_passes(
    rows: list[tuple[float, int, int]], budget: int, seats: int, prompts_first: bool
) -> None:
    """Consecutive passes that are one event give the times of passes that are simulated one by one."""
    how, pool = Scheduling(decodes_wait=prompts_first), byte_pool(budget, 4, most=200)
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": 16}
    together = served(how, *rows, pool=pool, **limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoding, "in_a_row", lambda self, most, room: 1)
        alone = served(how, *rows, pool=pool, **limits)
    for name in TIMES:
        assert getattr(together, name) == pytest.approx(getattr(alone, name), abs=1e-9), name


def test_whole_prompts_wait_for_a_pass_that_has_room() -> None:
    """A pass has 8 tokens. Prompts of 5 take one pass each instead of chunks 5 + 3, 2 + 5. A prompt of 12 is in chunks, alone."""
    rows = ((0.0, 5, 1), (0.0, 5, 1), (0.0, 12, 1))
    pieces, whole = served(Scheduling(), *rows, max_num_batched_tokens=8, max_num_seqs=4), served(
        Scheduling(whole_prompts=True), *rows, max_num_batched_tokens=8, max_num_seqs=4
    )  # fmt: skip
    assert [r.tokens for r in pieces.rows] == [8, 8, 6]
    assert [r.tokens for r in whole.rows] == [5, 5, 8, 4]


def test_reserving_answers_never_preempts() -> None:
    """The memory has 8 tokens, and two requests end at 6 each. The second waits for the first, and no cache is dropped."""
    log = served(Scheduling(reserve=1.0), (0.0, 3, 4), (0.0, 3, 4), pool=byte_pool(8))
    assert log.preemptions == 0
    assert log.finished.tolist() == [4, 8]


def test_prompts_wait_for_company() -> None:
    """Two prompts of 4 tokens fill the share of a pass that ends the wait. A single prompt waits three decode passes."""
    how = Scheduling(whole_prompts=True, wait_passes=3, wait_share=0.5)
    alone = served(how, (0.0, 4, 9), (0.5, 4, 1), max_num_batched_tokens=16, max_num_seqs=4)
    assert alone.first.tolist() == [1, 5]
    both = served(how, (0.0, 4, 9), (0.5, 4, 1), (1.5, 4, 1), max_num_batched_tokens=16, max_num_seqs=4)
    assert both.first.tolist() == [1, 3, 3]


def test_the_way_to_the_engine_and_thinking() -> None:
    """A client thinks 2 s. A request of 10 tokens reaches the engine after 0.5 + 10 · 0.05 = 1 s: sent at 0, there at 1,
    answered at 3."""
    clients = Clients(1, think_s=2.0, path_s=0.5, path_s_per_token=0.05)
    setup = ServerSetup(byte_pool(), HandTimer(HandClock(1.0)), Limits())
    log = simulate(asked((0.0, 10, 2), (0.0, 10, 2)), setup, clients=clients).logs[0]
    assert log.arrived.tolist() == [0, 5]
    assert log.first.tolist() == [2, 7]
    assert log.finished.tolist() == [3, 8]


@pytest.mark.parametrize(
    ("name", "gpu", "tp", "stack"),
    [("llama-3.1-8b", "h100", 1, "vllm"), ("gpt-oss-120b", "h200", 4, "trtllm"), ("gemma-3-27b", "b200", 1, "")],
)
def test_tables_are_whole_passes(name: str, gpu: str, tp: int, stack: str) -> None:
    """Passes from tables take the time of whole passes, within a few percent."""
    timed = TimedDeployment(load_model(name), load_gpu(gpu), parallelism=Parallelism(tp=tp))
    timed = timed.with_calibration(stack) if stack else timed
    tables = InterpolatedStepTimer(timed, 9000, 8192, 256)
    chance, ratios = np.random.default_rng(1), []
    for _ in range(25):
        count, context = int(chance.integers(1, 256)), float(chance.integers(100, 8000))
        chunks = tuple((int(chance.integers(50, 3000)), int(chance.integers(0, 3000))) for _ in range(int(chance.integers(1, 3))))
        decodes, prompts = Sequences(count, 1, int(context) - 1), [Sequences(1, *chunk) for chunk in chunks]
        ratios.append(tables.line(count, context).first / timed.seconds(Batch((decodes,))))
        ratios.append(tables.mixed(chunks, count, context) / timed.seconds(Batch((*prompts, decodes))))
    assert np.median(np.abs(np.array(ratios) - 1)) < 0.01
    assert np.abs(np.array(ratios) - 1).max() < 0.06


def test_what_operators_depend_on() -> None:
    """The LM head depends on sequences, attention on contexts, all other operators on the tokens of a pass."""
    operators = TimedDeployment(load_model("gpt2"), load_gpu("h100")).operators(Batch.decode(100, 4))
    found = {o.name: driving_quantity(o) for o in operators}
    assert [name for name, part in found.items() if part == "head"] == ["lm_head"]
    assert [name for name, part in found.items() if part == "group"] == ["attention"]


def test_small_runs_are_timed_as_they_are() -> None:
    timed = TimedDeployment(load_model("llama-3.1-8b"), load_gpu("h100")).with_calibration("vllm")
    tables, whole = InterpolatedStepTimer(timed, 3000, 8192, 64), StepTimer(timed)
    assert tables.prefill(((777, 0),)) == whole.prefill(((777, 0),))
    assert tables.line(1, 1234).first == whole.line(1, 1234).first
    # chunks are timed after multiples of 512 cached tokens; between two multiples, seconds rise evenly
    near, middle, far = (tables.mixed(((2000, past),), 8, 1000) for past in (512, 768, 1024))
    assert near < middle == pytest.approx((near + far) / 2, rel=1e-12)
    verifying = InterpolatedStepTimer(timed, 3000, 8192, 256, queries=4)  # a pass without chunks is a pass of its decodes
    assert verifying.mixed((), 200, 1234) == pytest.approx(verifying.line(200, 1234).first, rel=1e-9)


def test_a_ladder_climbs_by_its_ratio() -> None:
    assert geometric_points(1, 10, 1.5, 4) == [1, 2, 3, 4, 6, 9, 14]
    assert geometric_points(3, 5, 1.01) == [3, 4, 5]
