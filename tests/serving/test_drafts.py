"""A server with speculative decoding: steps by hand, random acceptance, and the memory of a draft."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Run
from servers import HandTimer, asked, byte_pool

from kvcalc import Batch, Parallelism
from kvcalc.serving.batching import Limits, ServerSetup
from kvcalc.serving.requests import Requests
from kvcalc.serving.simulation import Served, simulate
from kvcalc.serving.speculation import Drafting
from kvcalc.serving.step_timers import SpeculativeStepTimer


class Clock:
    """A pass takes `base` seconds, and `head` more if the LM head runs on every position."""

    model = SimpleNamespace(kinds={})

    def __init__(self, base: float, head: float = 0.0, dp: int = 1) -> None:
        self.base, self.head, self.parallelism, self.seen = base, head, Parallelism(dp=dp), list[tuple[Any, ...]]()

    def seconds(self, batch: Batch, all_positions: bool = False) -> Any:
        self.seen.append(tuple((g.count, g.new) for g in batch.groups))
        return self.base + self.head * all_positions + sum(0 * g.past for g in batch.groups)


def run(requests: Requests, acceptance: float, drafted: int = 3, pool: Any = None, dp: int = 1, **limits: Any) -> Served:
    """Simulate a server whose verification takes 1 s and 0.5 s for the head, and whose draft tokens take 0.25 s each."""
    steps = speculative(Clock(1.0, 0.5, dp), Clock(0.25, dp=dp), drafted, acceptance)
    return simulate(requests, ServerSetup(pool or byte_pool(), steps, Limits(**limits)))


def speculative(target: Clock, draft: Clock, drafted: int, acceptance: float) -> SpeculativeStepTimer:
    drafting = Drafting(draft, drafted, acceptance)  # type: ignore[arg-type]
    return SpeculativeStepTimer(HandTimer(target, drafted + 1), HandTimer(draft), drafting)


@pytest.mark.parametrize(("acceptance", "steps"), [(1.0, 2), (0.0, 8)])
def test_steps_by_hand(acceptance: float, steps: int) -> None:
    """The prompt takes 1 + 0.25 s and gives the first of 9 tokens. A step takes 1 + 0.5 + 3 · 0.25 s and gives 4
    tokens or 1 of the other 8."""
    log = run(asked((0.0, 10, 9)), acceptance).logs[0]
    assert log.first[0] == 1.25
    assert log.finished[0] == pytest.approx(1.25 + steps * 2.25)
    assert (log.verified, log.yielded) == (steps, 8)
    assert [r.tokens for r in log.rows] == [10] + [4] * steps


def test_a_pass_with_a_prompt_verifies_beside_it() -> None:
    """The second prompt arrives while the first request decodes: 5 tokens and one sequence of 4 queries. The
    draft processes both."""
    target, draft = Clock(1.0, 0.5), Clock(0.25)
    setup = ServerSetup(byte_pool(), speculative(target, draft, 3, 0.0), Limits())
    log = simulate(asked((0.0, 10, 9), (1.0, 5, 1)), setup).logs[0]
    assert ((1, 5), (1, 4)) in target.seen and ((1, 5),) in draft.seen
    assert log.first[1] == pytest.approx(1.25 + 1 + 0.5 + 0.75 + 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(("acceptance", "drafted", "expected"), [(0.8, 4, 3.3616), (0.5, 1, 1.5), (0.3, 8, 1.42855)])
def test_chance_yields_what_the_formula_says(acceptance: float, drafted: int, expected: float) -> None:
    """The mean is (1 − a^(k+1))/(1 − a). A step gives 1 to k + 1 tokens, so its standard deviation is at most k/2."""
    log = run(asked((0.0, 1, 20_001)), acceptance, drafted, byte_pool(most=30_000)).logs[0]
    assert log.yielded == 20_000
    assert log.yielded / log.verified == pytest.approx(expected, abs=4 * drafted / 2 / log.verified**0.5)


def test_sequences_progress_each_at_its_own_pace_and_the_seed_decides() -> None:
    requests = asked(*[(0.0, 10, 200)] * 40)
    first, again = run(requests, 0.5), run(requests, 0.5)
    assert np.array_equal(first.logs[0].finished, again.logs[0].finished)
    assert len(set(first.logs[0].finished.tolist())) > 10
    ranks = run(requests, 0.5, dp=2).logs
    assert not np.array_equal(ranks[0].finished, ranks[1].finished)


def test_drafted_tokens_count_towards_a_pass() -> None:
    """4 queries per sequence leave 4 of 8 tokens of a pass for a prompt of 10: chunks of 8, then 4, 4 and 2."""
    log = run(asked((0.0, 1, 30), (0.5, 10, 1)), 0.0, max_num_seqs=2, max_num_batched_tokens=8).logs[0]
    assert [(r.tokens, r.prefill_tokens) for r in log.rows][:4] == [(1, 1), (8, 4), (8, 4), (6, 2)]


def test_the_newest_makes_room_where_a_draft_proposes() -> None:
    """The memory has 8 tokens. Both requests store 4 after a step that gives one token each. The second is
    preempted, computes 5 tokens again, and ends last.

    Passes: both prompts (1.25 s), both decodes (2.25 s), the first request twice, the second's 5 tokens (1.25
    s), its last step.
    """
    log = run(asked((0.0, 3, 4), (0.0, 3, 4)), 0.0, pool=byte_pool(8)).logs[0]
    assert (log.preemptions, log.recomputed_tokens) == (1, 5)
    assert [r.tokens for r in log.rows for _ in range(r.passes)] == [6, 2 * 4, 4, 4, 5, 4]
    assert log.finished.tolist() == [1.25 + 3 * 2.25, 2 * 1.25 + 4 * 2.25]


def test_a_draft_takes_weights_and_cache(kvcalc: Run) -> None:
    """Llama-3.2-1B: 1,235,814,400 parameters of 2 bytes, and 16 layers · 2 · 8 heads · 64 · 2 = 32,768 bytes per
    token in addition to 131,072.

    A request of 100 input and 10 output tokens stores 109 tokens and 4 slots for draft tokens: 8 blocks of
    16.
    """
    line = "serve llama-3.1-8b --rate inf --num-prompts 1 --input-len 100 --output-len 10 --format json"
    (plain,) = kvcalc(line).records
    (drafted,) = kvcalc(f"{line} --draft llama-3.2-1b --num-speculative-tokens 4 --acceptance-rate 0.6").records
    assert plain["kv_budget_bytes"] - drafted["kv_budget_bytes"] == 2 * 1_235_814_400
    assert plain["kv_peak_bytes"] == 112 * 131_072
    assert drafted["kv_peak_bytes"] == 128 * (131_072 + 32_768)
    assert (drafted["draft"], drafted["num_speculative_tokens"], drafted["acceptance_rate"]) == ("llama-3.2-1b", 4, 0.6)
    assert 1 <= drafted["tokens_per_step"] <= 5 and plain["draft"] is plain["tokens_per_step"] is None


def test_speculation_helps_few_users_and_hurts_many(kvcalc: Run) -> None:
    """A single user gains about the speed-up of `latency`. 256 concurrent users lose throughput."""
    line = "serve llama-3.1-70b --gpu h200 --tp 4 --input-len 500 --output-len 200 --stack datasheet --format json"
    draft = "--draft llama-3.2-1b --num-speculative-tokens 4 --acceptance-rate 0.6"
    alone = [kvcalc(f"{line} --num-prompts 20 --max-concurrency 1 {more}").records[0]["tpot_mean_s"] for more in ("", draft)]
    (said,) = kvcalc(f"latency {line.removeprefix('serve ')} {draft}").records
    assert alone[0] / alone[1] == pytest.approx(said["speculative_speedup"], rel=0.05)
    assert said["speculative_e2e_s"] == pytest.approx(said["ttft_s"] + 199 * said["speculative_tpot_s"])
    crowd = [kvcalc(f"{line} --rate inf --num-prompts 512 {more}").records[0]["throughput_tokens_per_s"] for more in ("", draft)]
    assert crowd[1] < crowd[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--draft llama-3.2-1b --num-speculative-tokens 4 --policy static", "simulated only under continuous batching"),
        ("--draft llama-3.2-1b --num-speculative-tokens 99 --max-num-seqs 256", "fewer than 256 sequences of 100 queries"),
        ("--draft mtp --num-speculative-tokens 1", "declares no multi-token-prediction layers"),
        (
            "--draft qwen3-0.6b --num-speculative-tokens 2",
            "a draft proposes the model's own tokens, and qwen3-0.6b's has 151,936 entries, llama-3.1-8b's 128,256",
        ),
    ],
)
def test_what_no_server_can_do_is_refused(kvcalc: Run, options: str, said: str) -> None:
    result = kvcalc(f"serve llama-3.1-8b --num-prompts 3 {options}")
    assert result.code == 2 and said in result.err and len(result.err.splitlines()) == 1


def test_drafted_tokens_are_chosen_where_nobody_says(kvcalc: Run) -> None:
    """The default is the fastest number for one request, as in `latency`. DeepSeek-V3 has one prediction layer."""
    line = "llama-3.1-70b --gpu h200 --tp 4 --input-len 500 --output-len 10 --draft llama-3.2-1b --acceptance-rate 0.6"
    (served,), (alone,) = (
        kvcalc(f"{command} {line} --format json").records
        for command in ("serve --rate inf --num-prompts 3 --max-num-seqs 16", "latency")
    )
    assert served["num_speculative_tokens"] == alone["num_speculative_tokens"] > 0
    out = " ".join(kvcalc(f"serve --rate inf --num-prompts 3 --max-num-seqs 16 {line} -v").out.split())
    assert f"{alone['num_speculative_tokens']} draft tokens of llama-3.2-1b per step" in out and "the best for one request" in out
    (own,) = kvcalc(
        "serve deepseek-v3 --gpu h200 --tp 8 --rate inf --num-prompts 1 --max-num-seqs 16 --osl 5 --draft mtp --format json"
    ).records
    assert (own["num_speculative_tokens"], own["num_speculative_tokens_from"]) == (1, "one for each prediction layer")


def test_prediction_layers_serve_with_their_own_weights_and_cache(kvcalc: Run) -> None:
    """DeepSeek-V3's one MTP layer stores (512 + 64) · 2 bytes per token in addition to 61 layers. vLLM allocates
    64 tokens per page."""
    line = "serve deepseek-v3 --gpu h200 --tp 8 --rate inf --num-prompts 1 --input-len 10 --output-len 5 --format json"
    (plain,), (drafted,) = (kvcalc(f"{line} {more}").records for more in ("", "--draft mtp --num-speculative-tokens 1"))
    assert (plain["kv_peak_bytes"], drafted["kv_peak_bytes"]) == (64 * 61 * 1152, 64 * 62 * 1152)
    (fitted,) = kvcalc("fit deepseek-v3 --gpu h200 --tp 8 --mtp --format json").records
    assert plain["kv_budget_bytes"] - drafted["kv_budget_bytes"] == fitted["mtp_weight_bytes"]


def test_vllm_takes_no_padding_for_a_draft_s_vocabulary_and_llama_cpp_128_entries_of_it(kvcalc: Run) -> None:
    """Qwen2.5's 0.5B has 151,936 entries, its 72B 152,064: `vocab_size` in both files."""
    both = "qwen2.5-72b --gpu h200 --tp 2 --max-model-len 4k --draft qwen2.5-0.5b"
    refused = kvcalc(f"fit {both} --engine vllm")
    assert (refused.code, refused.out) == (2, "")
    assert "vLLM drafts only with the model's own vocabulary, and qwen2.5-0.5b's has 151,936 entries" in refused.err
    assert kvcalc(f"fit {both} --engine sglang").code == 0
    assert kvcalc("latency qwen2.5-72b --gpu h200 --tp 2 --draft qwen2.5-0.5b --num-speculative-tokens 2").code == 0
    config = '{"model": "Qwen/Qwen2.5-0.5B-Instruct", "num_speculative_tokens": 3, "use_heterogeneous_vocab": true}'
    line = "fit --gpu h200 -- vllm serve Qwen/Qwen2.5-72B-Instruct -tp 2 --max-model-len 4096 --speculative-config"
    assert "the draft Qwen/Qwen2.5-0.5B-Instruct is not counted" in kvcalc(line, config).err
