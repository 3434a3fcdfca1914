"""Batches with decodes and prompts: every group has its own window, top-k or form, and the times of the groups add up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc import Batch, Cost, Operator, Sequences, forward, load_gpu, load_model
from kvcalc.layers.cost import AttentionShape
from kvcalc.timing.calibration import Calibration, KernelModelEntry
from kvcalc.timing.kernel_models.families import AnyKernelModel
from kvcalc.timing.kernel_models.flash_attention import DecodeAttention, PrefillAttention
from kvcalc.timing.kernel_models.kernel_model import figures_of
from kvcalc.timing.kernel_models.mla import MlaDecode, MlaPrefill
from kvcalc.timing.steps import operator_seconds, pass_time

H100 = load_gpu("h100")
DECODES, PROMPT = Sequences(64, 1, 32_767), Sequences(1, 2048, 0)
MIXED = Batch((DECODES, PROMPT))


def entry(law: AnyKernelModel) -> KernelModelEntry:
    return KernelModelEntry(law=law, rows=1, median_abs_error=0, p90_abs_error=0)


DECODE, PREFILL, MLA, MLA_PREFILL = DecodeAttention(cold=True), PrefillAttention(), MlaDecode(cold=True), MlaPrefill()
MINE = Calibration(
    gpu="h100-sxm",
    stack="mine",
    laws={
        "decode_attention": {"bfloat16": entry(DECODE)},
        "prefill_attention": {"bfloat16/bfloat16": entry(PREFILL)},
        "mla_decode": {"bfloat16": entry(MLA)},
        "mla_prefill": {"bfloat16": entry(MLA_PREFILL)},
    },
)


def attentions(name: str, batch: Batch, form: str = "auto") -> dict[tuple[str, str], tuple[Operator, float]]:
    """Return each attention of a pass by layer and form, with the µs of one run."""
    operators = forward(load_model(name), batch, mla_form=form)
    timed = zip(operators, operator_seconds(operators, H100, MINE), strict=True)
    return {(o.layer, o.form): (o, t.seconds * 1e6 / o.count) for o, t in timed if isinstance(o.shape, AttentionShape)}


def law_us(law: AnyKernelModel, *shape: float) -> float:
    return float(law.us(figures_of(H100), *(np.array([float(x)]) for x in shape))[0])


def groups_of(operator: Operator) -> tuple[tuple[int, int, int, int], ...]:
    assert isinstance(operator.shape, AttentionShape)
    return operator.shape.groups  # type: ignore[return-value]


def test_gemma_3_27b_s_local_layer_decodes_under_its_window_beside_a_prompt() -> None:
    """A decode at 32,768 sees 1,024 tokens; of 2,048 queries the first 1,024 see 1 … 1,024 and the others 1,024 each."""
    operator, us = attentions("gemma-3-27b", MIXED)["local", ""]
    seen = 1024 * 1025 // 2 + 1024 * 1024
    assert groups_of(operator) == ((64, 1, 32_767, 64 * 1024), (1, 2048, 0, seen))
    decoding = law_us(DECODE, 64, 32, 16, 128, 1024, 0)
    prompt = law_us(PREFILL, 1, 32, 16, 128, 2048, 0, seen / 2048)
    assert us == pytest.approx(decoding + prompt, rel=1e-12)
    assert 0 < us < 0.2 * attentions("gemma-3-27b", MIXED)["full", ""][1]
    later = [attentions("gemma-3-27b", Batch.prefill(17, 64, past))["local", ""][1] for past in (1100, 3000)]
    assert later[0] == later[1]  # each query sees its whole window


# name, layer, form asked for, pairs of the 64 decodes, pairs of the prompt; by hand from each config
CAUSAL = 2048 * 2049 // 2
GROUPS = [
    ("gemma-3-27b", "full", "auto", 64 * 32_768, CAUSAL),
    ("gpt-oss-20b", "local", "auto", 64 * 128, 128 * 129 // 2 + 1920 * 128),
    ("llama-4-scout", "chunked", "auto", 64 * 8192, CAUSAL),  # token 32,768 ends its chunk of 8,192
    ("minimax-m3", "moe", "auto", 64 * 16 * 128, CAUSAL),  # 16 blocks of 128 tokens
    ("deepseek-v3", "moe", "absorbed", 64 * 32_768, CAUSAL),
    ("deepseek-v3.2", "moe", "absorbed", 64 * 2048, CAUSAL),  # 2,048 latents of 32,768
]


@pytest.mark.parametrize(("name", "layer", "form", "decodes", "prompt"), GROUPS)
def test_each_group_of_a_mixed_batch_takes_what_it_takes_alone(
    name: str, layer: str, form: str, decodes: int, prompt: int
) -> None:
    found = [attentions(name, Batch(g), form)[layer, "absorbed" if form == "absorbed" else ""] for g in ((DECODES,), (PROMPT,))]
    mixed, us = attentions(name, MIXED, form)[layer, found[0][0].form]
    assert groups_of(mixed) == ((64, 1, 32_767, decodes), (1, 2048, 0, prompt))
    assert groups_of(mixed) == groups_of(found[0][0]) + groups_of(found[1][0])
    assert us == pytest.approx(found[0][1] + found[1][1], rel=1e-12)


@pytest.mark.parametrize(("name", "seen"), [("deepseek-v3", 32_768), ("deepseek-v3.2", 2048)])
def test_latent_attention_decodes_absorbed_beside_an_expanded_prompt(name: str, seen: int) -> None:
    """Two operators, each with its own groups: latents of 576 shared by all heads, keys of 192 with values of 128 per head."""
    mixed = attentions(name, MIXED)
    absorbed, expanded = mixed["moe", "absorbed"], mixed["moe", "expanded"]
    assert absorbed[1] == attentions(name, Batch((DECODES,)))["moe", "absorbed"][1]
    assert expanded[1] == attentions(name, Batch((PROMPT,)))["moe", "expanded"][1]
    assert groups_of(absorbed[0]) == ((64, 1, 32_767, 64 * seen),)
    assert groups_of(expanded[0]) == ((1, 2048, 0, CAUSAL),)
    assert absorbed[1] == pytest.approx(law_us(MLA, 64, 128, seen), rel=1e-12)
    keys = CAUSAL / 2048
    assert expanded[1] == pytest.approx(law_us(MLA_PREFILL, 1, 128, 2048, keys, 192 + 128), rel=1e-12)
    forced = attentions(name, Batch((PROMPT,)), "absorbed")["moe", "absorbed"][1]
    assert forced == pytest.approx(law_us(MlaPrefill(attends="absorbed"), 1, 128, 2048, keys, 1088), rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-27b", "deepseek-v3.2"])
def test_an_array_from_one_token_to_many_changes_its_kernel_on_the_way(name: str) -> None:
    """Decode kernels process up to 16 new tokens of a sequence. From the 17th on, the prefill kernel is used."""
    model = load_model(name)
    new = np.array([1.0, 2, 16, 17, 18, 500])
    many = pass_time(forward(model, Batch((Sequences(2, new, 4000), DECODES))), H100, MINE).seconds
    alone = [
        pass_time(forward(model, Batch((Sequences(2, n, 4000), DECODES))), H100, MINE).seconds for n in (1, 2, 16, 17, 18, 500)
    ]
    assert many.tolist() == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("new", "laws"), [((1, 2, 16), "decode_attention"), ((17, 18, 500), "prefill_attention")])
def test_an_array_on_one_side_asks_for_no_law_of_the_other(new: tuple[int, ...], laws: str) -> None:
    one = Calibration(gpu="h100-sxm", stack="mine", laws={laws: MINE.laws[laws]})
    many = forward(load_model("llama-3.1-8b"), Batch((Sequences(2, np.array(new), 4000),)))
    (found,) = (t for o, t in zip(many, operator_seconds(many, H100, one), strict=True) if o.name == "attention")
    alone = [attentions("llama-3.1-8b", Batch((Sequences(2, n, 4000),)))["full", ""] for n in new]
    assert (np.asarray(found.seconds) * 1e6).tolist() == pytest.approx([us * o.count for o, us in alone], rel=1e-12)


shapes = st.sampled_from([(32, 8, 128, 128), (64, 1, 64, 64), (16, 16, 192, 128), (128, 0, 576, 512)])
prompts = st.builds(
    lambda count, new, past, share: (count, new, past, max(count * new, int(share * count * new * (past + (new + 1) / 2)))),
    st.integers(1, 8), st.integers(17, 5000), st.integers(0, 50_000), st.floats(0.01, 1),
)  # fmt: skip
decodes = st.builds(
    lambda count, new, past, share: (count, new, past, max(count * new, int(share * count * new * past))),
    st.integers(1, 300), st.integers(1, 16), st.integers(0, 100_000), st.floats(0.01, 1),
)  # fmt: skip


def law_seconds(shape: tuple[int, int, int, int], *groups: tuple[int, int, int, int]) -> float:
    """Return the seconds of an attention by the kernel models only. Its bound is 0."""
    operator = Operator("attention", "k", 3, "attention", Cost(), "bf16", shape=AttentionShape(*shape, ("bf16",), groups))
    (timed,) = operator_seconds([operator], H100, MINE)
    assert timed.basis == "calibrated"
    return float(timed.seconds)


@given(shapes, decodes, st.lists(prompts, min_size=1, max_size=3))
def test_decodes_and_prompts_are_launches_of_their_own(
    shape: tuple[int, int, int, int], decoding: tuple[int, int, int, int], fresh: list[tuple[int, int, int, int]]
) -> None:
    parts = [law_seconds(shape, group) for group in (decoding, *fresh)]
    assert law_seconds(shape, decoding, *fresh) == pytest.approx(sum(parts), rel=1e-12)
    assert law_seconds(shape, *fresh, decoding) == pytest.approx(sum(parts), rel=1e-12)
