"""Prefixes that requests share: by hand, against a pool of single blocks, and nothing lost or counted twice."""

import random
from collections import deque
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import Run
from servers import HandClock, HandTimer, byte_pool

from kvcalc import Parallelism, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.serving.arrivals import ArrivalQueue
from kvcalc.serving.batching import Continuous, ServerSetup
from kvcalc.serving.cache_accounting import Log, Pool
from kvcalc.serving.decoding import Limits
from kvcalc.serving.prefix_cache import BlockPrefixCache, FixedRatePrefixCache
from kvcalc.serving.requests import Requests
from kvcalc.serving.server import serve
from kvcalc.timing.deployment import TimedDeployment


def server(
    rows: list[tuple[float, int, int]], names: list[int], lengths: list[int], pool: Pool, block: int, **limits: Any
) -> Continuous:
    """A server whose pass takes a second, run to its end; rows as (arrival, prompt, answer)."""
    arrivals, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    log = Log(len(rows))
    door = ArrivalQueue(Requests(arrivals.astype(float), inputs, outputs), pool, log)
    kept = BlockPrefixCache(names, lengths, pool, block)
    setup = ServerSetup(pool, HandTimer(HandClock()), Limits(**limits), make_prefixes=lambda: kept)
    found = Continuous(door, setup, log)
    while found.run():
        pass
    return found


def test_who_runs_with_a_prefix_holds_it_together_with_others() -> None:
    """Blocks of 4 bytes and tokens, 10 of them. Prompts of 24 tokens begin with the same 20, answers of 2 tokens.

    The first takes 6 blocks, and a seventh for its 25th token. The second comes when the prefix has been computed: it finds 5
    blocks that the first one holds, and takes one and another one, 9 in all. Counted twice, 14 would not be there, and it would
    wait for the first to end. A third one of 12 tokens of its own finds 3 blocks when the first, done, has given back two.
    """
    asks = [(0.0, 24, 3), (0.5, 24, 3), (1.0, 12, 1)]
    run = server(asks, [0, 0, -1], [20, 20, 0], byte_pool(40, 4), 4)
    assert run.log.found_tokens == 20
    assert run.log.scheduled.tolist() == [0, 1, 3]
    assert run.log.finished.tolist() == [3, 4, 4]
    assert run.log.peak == 4 * 10  # the second's 7 blocks, 5 of them the prefix, and 3
    apart = server(asks, [0, 1, -1], [20, 20, 0], byte_pool(40, 4), 4)
    assert apart.log.scheduled.tolist() == [0, 3, 3]


def test_what_nobody_holds_goes_from_the_head_of_the_queue() -> None:
    """Ten blocks of 4 bytes. Prefix 0 has 2 blocks, prefix 1 has 3; a request of either ends, with a block of its own.

    The queue is then: own, 0's second, 0's first, own, 1's third, second, first, behind 3 blocks that were never used.
    """
    kept = BlockPrefixCache([0, 1, 0, 1, 0], [8, 12, 8, 12, 8], byte_pool(block=4), 4)
    for index, held in ((0, 12), (1, 16)):
        assert kept.cached_tokens(index, held - 1, 40) == 0
        assert kept.keep(index, held - 1) == 0
        assert kept.release(index, held) == 0
    assert [kept.cached_tokens(i, 20, 40) for i in (2, 3)] == [8, 12]
    assert kept.cached_tokens(2, 20, 24) == 8  # the oldest went, which no other prompt begins with
    assert kept.cached_tokens(2, 20, 20) == 4
    kept.take(2, 4)  # held, it leaves the queue: own, 1's third, second, first
    assert (kept.queued, kept.shared_bytes(4, 4), kept.shared_bytes(3, 12)) == (4, 4, 0)
    assert kept.cached_tokens(3, 20, 12) == 12
    assert kept.cached_tokens(3, 20, 8) == 8
    kept.take(4, 4)
    assert kept.shared_stored == 4
    assert kept.release(2, 4) == 4  # the other one holds it on
    assert kept.cached_tokens(3, 20, 0) == 0
    assert kept.cached_tokens(2, 20, 0) == 4  # what is held stays


class Blocks:
    """A pool of blocks one by one, as vLLM has it: a queue of those that nobody holds, taken at its head."""

    def __init__(self, count: int) -> None:
        self.free, self.holders = deque(range(count)), [0] * count
        self.by_name: dict[tuple[int, int], int] = {}
        self.name_of: dict[int, tuple[int, int]] = {}

    def hits(self, name: int, whole: int) -> list[int]:
        at = next((at for at in range(whole) if (name, at) not in self.by_name), whole)
        return [self.by_name[name, i] for i in range(at)]

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.holders[block]:
                self.free.remove(block)
            self.holders[block] += 1

    def new(self, count: int) -> list[int]:
        found = [self.free.popleft() for _ in range(count)]
        for block in found:
            self.by_name.pop(self.name_of.pop(block, (-1, -1)), None)
            self.holders[block] = 1
        return found

    def computed(self, name: int, whole: int, blocks: list[int]) -> None:
        """Leading blocks get their names; where others have them by now, those are held in their place."""
        for at in range(whole):
            there = self.by_name.get((name, at))
            if there is None:
                self.by_name[name, at], self.name_of[blocks[at]] = blocks[at], (name, at)
            elif there != blocks[at]:
                self.touch([there])
                self.holders[blocks[at]] = 0
                self.free.appendleft(blocks[at])
                blocks[at] = there

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)


def test_the_cache_is_what_a_pool_of_single_blocks_is() -> None:
    """Requests come, are computed, grow and end in any order, 30 times 300 events over 60 blocks of 4 tokens and bytes."""
    hits = shared = 0
    for seed in range(30):
        chance, pool, running = random.Random(seed), Blocks(60), dict[int, list[int]]()
        names, lengths = [chance.randrange(-1, 4) for _ in range(300)], [chance.choice((0, 4, 9, 30, 48)) for _ in range(300)]
        kept, computed = BlockPrefixCache(names, lengths, byte_pool(block=4), 4), set[int]()
        for i, name in enumerate(names):
            prompt, free = chance.choice((3, 9, 40, 50)), 4 * len(pool.free)
            whole = min(lengths[i], prompt) // 4 if name >= 0 else 0
            there = pool.hits(name, whole)
            found = kept.cached_tokens(i, prompt, free)
            assert found == min(4 * len(there), prompt - 1)
            new = -(-prompt // 4) - len(there)
            common = sum(pool.holders[block] > 0 for block in there)
            assert kept.shared_bytes(i, found) == 4 * common
            if new + len(there) - common <= len(pool.free):
                pool.touch(there)
                kept.take(i, found)
                running[i] = there + pool.new(new)
                kept.settle(4 * len(pool.free))
                hits += len(there)
            for j in [j for j in running if chance.random() < 0.3]:
                if j not in computed:
                    prompt = 4 * len(running[j])
                    pool.computed(names[j], min(lengths[j], prompt) // 4 if names[j] >= 0 else 0, running[j])
                    kept.keep(j, prompt)
                    computed.add(j)
                elif chance.random() < 0.5 and pool.free:
                    running[j] += pool.new(1)
                    kept.settle(4 * len(pool.free))
                else:
                    blocks = running.pop(j)
                    pool.release(blocks)
                    kept.release(j, 4 * len(blocks))
            held = [block for blocks in running.values() for block in blocks]
            assert kept.shared == len(held) - len(set(held))
            assert kept.queued <= len(pool.free) == 60 - len(set(held))
            shared += kept.shared
    assert hits > 2000
    assert shared > 2000


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_under_preemption(seed: int) -> None:
    """Whatever is computed is a prompt's, less what was found, and what was computed again; all memory comes back."""
    chance = np.random.default_rng(seed)
    count = 300
    inputs, outputs = chance.integers(1, 200, count), chance.integers(1, 80, count)
    names, lengths = chance.integers(-1, 6, count).tolist(), chance.choice([8, 50, 120], count).tolist()
    rows = list(zip(np.sort(chance.uniform(0, 900, count)).tolist(), inputs.tolist(), outputs.tolist(), strict=True))
    run = server(rows, names, lengths, byte_pool(400, 4), 4, max_num_batched_tokens=256, max_num_seqs=64)
    log, kept = run.log, run.prefixes
    assert isinstance(kept, BlockPrefixCache)
    assert log.preemptions > 20
    assert log.found_tokens > 1000
    assert log.prefill_tokens == inputs.sum() - log.found_tokens + log.recomputed_tokens
    assert (run.held, run.decoding.count, kept.shared, kept.blocks_held, kept.holders) == (0, 0, 0, {}, {})
    assert 300 < log.peak <= 400
    kept.settle(400)
    assert sum(stretch.end - stretch.first for stretch in kept.queue) == kept.queued <= 100
    assert 0 < log.stored_byte_s <= log.allocated_byte_s


def test_a_share_of_each_prompt_is_stored_once() -> None:
    """Blocks of 10 bytes and tokens. Three prompts of 100 tokens share 60, and 20 more each: 60 + 3 · (40 + 10) at the end.

    170 bytes hold two of them, 60 + 2 · 50, and the third starts when they are done.
    """
    rows = [(0.0, 100, 3)] * 3
    for budget, peak, starts in ((210, 210, [0, 0, 0]), (170, 160, [0, 0, 3])):
        log = Log(3)
        pool = byte_pool(budget, 10)
        door = ArrivalQueue(Requests(*(np.array(column) for column in zip(*rows, strict=True))), pool, log)
        steps = HandTimer(HandClock())
        setup = ServerSetup(pool, steps, Limits(), make_prefixes=partial(FixedRatePrefixCache, 0.6, pool, 10))
        run = Continuous(door, setup, log)
        while run.run():
            pass
        assert (log.peak, log.scheduled.tolist()) == (peak, starts)
        assert (run.held, log.found_tokens, log.prefill_tokens) == (0, 180, 120)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-4b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("rate", [0.25, 0.75])
def test_running_requests_take_the_memory_that_fit_counts(name: str, rate: float) -> None:
    """8 prompts of 6,400 tokens are there together before the first of them has its 160 tokens.

    The peak is then between what `fit --shared-prefix` counts of 8 sequences at the begin and at the end of their answers.
    """
    deployment = TimedDeployment(load_model(name), load_gpu("h200"), parallelism=Parallelism(tp=2)).under()
    load = Workload(num_prompts=8, input_len="6400", output_len="160", prefix_hit_rate=rate)
    record = serve(deployment, load, ServerSettings()).record
    plan = fit(deployment, FitOptions(max_model_len=6400 + 160)).plan
    least, most = (plan.needed(8, length, int(rate * 6400)) - plan.needed(0, length) for length in (6400, 6400 + 160))
    assert least <= record["kv_peak_bytes"] <= most
    block = plan.block_size or 16
    assert record["prefix_hit_share"] == int(rate * 6400) // block * block / 6400
    apart = msgspec.structs.replace(load, prefix_hit_rate=0.0)
    alone = serve(deployment, apart, ServerSettings()).record
    saved = plan.needed(8, 6400) - plan.needed(8, 6400, int(rate * 6400))
    assert alone["kv_peak_bytes"] - record["kv_peak_bytes"] == pytest.approx(saved, rel=0.02)


def test_a_list_of_rates_makes_rows(kvcalc: Run) -> None:
    line = "serve llama-3.1-8b --rate 5 --num-prompts 60 --input-len 1000 --output-len 50 --format json --prefix-hit-rate"
    rows = kvcalc(f"{line} 0,0.5,0.9").records
    assert [r["prefix_hit_rate"] for r in rows] == [None, 0.5, 0.9]
    assert rows[1:] == [kvcalc(f"{line} {rate}").records[0] for rate in (0.5, 0.9)]
    for key in ("kv_peak_bytes", "ttft_p50_s"):
        assert rows[0][key] > rows[1][key] > rows[2][key]
    assert rows[0]["capacity_requests_per_s"] < rows[1]["capacity_requests_per_s"] < rows[2]["capacity_requests_per_s"]
    assert "prefix-hit-rate 1.5 is not between 0 and 1" in kvcalc(f"{line} 0.5,1.5").err


def test_prefixes_are_shared_in_pages(kvcalc: Run, tmp_path: Any) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_len,output_len,prefix_id,prefix_len\n0,64,2,a,32\n")
    assert "need pages" in kvcalc(f"serve llama-3.1-8b --requests {path} --cache contiguous").err
