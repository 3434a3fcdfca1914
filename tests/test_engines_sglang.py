"""SGLang's pools by the rules of its source (0.5.23), each figure by hand."""

from typing import Any

import msgspec
import pytest

from kvcalc import Deployment, Parallelism, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.capacity.engines.sglang import SGLang


def pools(model: str, pp: int = 1, **asked: Any) -> SGLang:
    plan = fit(
        Deployment(load_model(model), load_gpu("h200"), parallelism=Parallelism(pp=pp)), FitOptions(engine="sglang", **asked)
    ).plan
    assert isinstance(plan, SGLang)
    return plan


SMALL = msgspec.structs.replace(load_model("llama-3.2-1b"), vocab_size=201_088)  # gpt-oss-20b's


@pytest.mark.parametrize(
    ("model", "asked", "full", "window", "limit"),
    [
        # 12 layers of 8 · (64 + 64) · 2 B without a window and 12 with; of a window 128, 128 behind it, a page before and after
        ("gpt-oss-20b", {}, 12 * 2048, 12 * 2048, 128 + 128 + 2),
        ("gpt-oss-20b", {"hybrid": False}, 24 * 2048, 0, None),
        # is_hybrid_swa_model does not name Gemma 3 nor Mistral: every one of its layers has every slot
        ("gemma-3-4b", {}, 34 * 4096, 0, None),
        ("mistral-7b-v0.1", {}, 32 * 4096, 0, None),
        # Gemma 4 E4B: 42 layers have slots, the 18 that read another's too; 7 of 2 · (512 + 512) · 2 B, 35 of half as much
        ("gemma-4-e4b", {}, 7 * 4096, 35 * 2048, 512 + 128 + 2),
        # a chunk of 8192 in 36 of Llama 4 Scout's 48 layers
        ("llama-4-scout", {}, 12 * 4096, 36 * 4096, 8192 + 128 + 2),
        # 21 of 78 layers index: 132 B each; the prediction layer has 1152 and 132 of its own
        ("glm-5.2", {}, 78 * 1152 + 21 * 132, 0, None),
        ("glm-5.2", {"mtp": True}, 79 * 1152 + 22 * 132, 0, None),
        # a draft's 16 layers are counted like 16 of the target's 32
        ("llama-3.1-8b", {"draft": load_model("llama-3.2-1b")}, 48 * 4096, 0, None),
        # four tokens are verified at once: 4 · 128 behind the window, a page, and twice four ahead
        ("gpt-oss-20b", {"draft": SMALL}, 28 * 2048, 12 * 2048, 128 + 512 + 1 + 8),
    ],
)
def test_slots(model: str, asked: dict[str, Any], full: int, window: int, limit: int | None) -> None:
    plan = pools(model, **asked)
    assert (plan.full, plan.window) == (full, window)
    assert limit is None or plan.limit == limit
    has_windows = any(entry.limit and entry.grows for entry in load_model(model).entries)
    assert any("keeps tokens" in note for note in plan.notes) == (has_windows and not window)


def test_states_share_a_budget_with_tokens() -> None:
    """Qwen3.5-27B, 48 layers of 10,240 · 3 · 2 + 48 · 128 · 128 · 4 B. 9/19 of 20 GiB are 66 slots, one of them for padding.

    A request needs 3 slots and 2 more for tracking: 13 requests. Tokens have 20 GiB minus 66 slots, at 16 layers of 4096
    B.
    """
    plan, budget, slot = pools("qwen3.5-27b"), 20 << 30, 48 * (10240 * 3 * 2 + 48 * 128 * 128 * 4)
    assert (plan.state, plan.full) == (slot, 16 * 4096)
    assert (budget * 9 // 19 // slot, plan.state_slots(budget)) == (66, 65)
    assert plan.slots(budget) == (budget - 66 * slot) // (16 * 4096) == 172_646
    assert plan.concurrency(budget, 4096) == 13
    assert pools("lfm2-1.2b").request_states == 3  # nothing is tracked beside


def test_states_of_drafted_tokens() -> None:
    """If 4 tokens are verified together, every request has 4 more states: (9/19 of 20 GiB − 5 slots) ÷ 1.8 slots = 33, 6
    requests."""
    plan, budget = pools("qwen3.5-27b", mtp=True), 20 << 30
    slot, share = plan.state, (20 << 30) * 9 / 19
    assert plan.full == 17 * 4096
    assert plan.state_slots(budget) == int((share - slot * 5) // (slot * 1.8)) == 33
    assert plan.slots(budget) == (budget - slot * (34 + 7 * 4)) // (17 * 4096)
    count = plan.concurrency(budget, 4096)
    assert count == 6 and isinstance(count, int)  # JSON writes 6, not 6.0
    assert pools("qwen3.5-27b", mtp=True, num_speculative_tokens=1).draft_states == 2


def test_stages_have_the_states_of_the_largest() -> None:
    """Each of two stages of 32 layers has 24 layers with a state, half of all."""
    assert pools("qwen3.5-27b", 2).state * 2 == pools("qwen3.5-27b").state


@pytest.mark.parametrize("states", [(1, 0), (5, 0), (5, 4)])
def test_what_is_needed_is_enough(states: tuple[int, int]) -> None:
    plan = SGLang(10, 0, 0, 100, 1, *states)
    for sequences in (1, 3, 10):
        needed = plan.needed(sequences, 50)
        assert all(plan.concurrency(n, 50) >= sequences for n in range(needed, needed + 400))
        assert all(plan.allocated(n, 1, 1) <= n for n in range(needed, needed + 400))


def test_slots_of_adapters_stand_before_the_cache() -> None:
    """Two slots of rank 8 for Llama-3.1-8B's matrices: q and o 4096 · 4096, k and v to 1024, gate, up and down 14,336 wide."""
    widths = 32 * (2 * 2 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14_336))
    run = Deployment(load_model("llama-3.1-8b"), load_gpu("h100"))
    terms = fit(run, FitOptions(engine="sglang", max_loras=2, max_lora_rank=8)).terms
    assert terms.extra["LoRA slots"] == 2 * 2 * 8 * widths


@pytest.mark.parametrize(("model", "dtype"), [("olmo-2-7b", "fp16"), ("gemma-2-9b", "bf16"), ("llama-3.1-8b", "bf16")])
def test_float32_checkpoints_are_cast(model: str, dtype: str) -> None:
    """OLMo-2-7B and Gemma-2-9B are published in fp32; two bytes a parameter are loaded, as of Llama-3.1-8B."""
    found = fit(Deployment(load_model(model), load_gpu("h200")), FitOptions(engine="sglang"))
    assert (found.formats.weights_label, found.formats.kv_cache_dtype) == (dtype, dtype)
    assert found.terms.language == 2 * load_model(model).parameters
