"""Generation: all modes give the same tokens, bytes equal those of the operators, and a prediction by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from specs import grouped, latent, sparse, stack
from twins import WIDTH, torch

from kvcalc import Model, UserError, cache_size, load_model
from kvcalc.measure import generation
from kvcalc.measure.cases import variant_model
from kvcalc.measure.ceilings import Ceilings, Machine, as_gpu
from kvcalc.measure.expected import MachineRates
from kvcalc.measure.generation import CACHED, MODES, GenerationRequest, Mode, check, run_generation
from kvcalc.model.precision import Precision
from kvcalc.planning.variants import variant

MACHINE = Machine(torch.device("cpu"), "a CPU", 16 << 30, 1 << 20, 1)
PRODUCTS = (1, 4, 64), (1e-9, 2e-9, 8e-9)
CEILINGS = Ceilings(10e9, 20e9, {"fp32": 100e9, "bf16": 50e9, "fp64": 50e9}, 1e-6)
GPU = as_gpu(MACHINE, CEILINGS)
GPT = stack(
    grouped(4, 4, 8, q_bias=True), layers=2, hidden_size=32, ffn=64, vocab_size=60, norm="layer", position_embeddings=32,
    tie_word_embeddings=True,
)  # fmt: skip
SHARING = stack(grouped(4, 2, 16), latent(), sparse(index_n_heads=16), vocab_size=60)
CLA = variant(stack(grouped(4, 2, 8), layers=4, vocab_size=60), "cla:2").model
WINDOW = stack(grouped(4, 2, 8, sliding_window=6), layers=2, vocab_size=60)


def quiet(*_: Any) -> None:
    """Return a progress function that does nothing."""


@pytest.mark.parametrize("model", [GPT, SHARING, CLA, WINDOW])
def test_all_modes_choose_the_same_tokens(model: Model) -> None:
    torch.manual_seed(4)
    records = list(run_generation(GenerationRequest(model, 5, 12, 2, "fp64"), MACHINE, GPU, quiet))
    assert [Mode(r["mode"], r["head"]) for r in records] == list(MODES)
    for record in records:
        assert record["same_tokens"]
        assert len(record["token_s"]) == len(record["predicted_token_s"]) == 12
        assert record["predicted_bytes"] == record["allocated_bytes"]
        assert record["bound_total_s"] > 0
        assert record["total_s"] == sum(record["token_s"])
        assert record["ratio"] == record["total_s"] / sum(record["predicted_token_s"])
        assert record["speedup"] == record["total_s"] / records[0]["total_s"]
    assert records[0]["predicted_bytes"] == cache_size(model, 17, 2, Precision("fp64")).stored


@pytest.mark.parametrize(("rows", "nanoseconds"), [(0.5, 1), (1, 1), (2.5, 1.5), (4, 2), (34, 5), (64, 8), (128, 16)])
def test_products_between_measured_rows(rows: float, nanoseconds: float) -> None:
    assert rates(0, 0).product_seconds(rows, 1000) == pytest.approx(nanoseconds * 1e-6)


def rates(vector_s: float, host_s: float, is_cuda: bool = False) -> MachineRates:
    return MachineRates(*PRODUCTS, {1: 1e-9, 2: 4e-9 / 3}, vector_s, host_s, GPU, is_cuda)


def test_a_prediction_by_hand() -> None:
    """A decode step of one layer of 4 heads over 2 groups of 8, D = 32 and F = 64, at 10 tokens of one sequence, fp32.

    Products of one row take 1 ns for each weight, attention of the two heads of a group 4/3 ns for each key and value element.
    Elementwise work takes 2 ns for each vector FLOP, which is more than its bytes do; the embedding has no FLOPs.
    """
    model = stack(grouped(4, 2, 8), hidden_size=32, ffn=64, vocab_size=60)
    products = (4 * 8 + 2 * 2 * 8) * 32 + 4 * 8 * 32 + 3 * 32 * 64 + 32 * 60
    keys_and_values = 2 * 2 * 8 * 10 * (1 + 1 / 3)
    rope, norms, activation, softmax, sampling = 3 * (4 + 2) * 8, 4 * 32 * 3, 8 * 64, 5 * 4 * 10, 5 * 60
    embedding = 2 * 32 * 4 / 20
    work = products + keys_and_values + 2 * (rope + norms + activation + softmax + sampling) + embedding
    operators = GenerationRequest(model, 9, 3, 1, "fp32").operators(CACHED, 1)
    assert rates(2e-9, 1e-6).pass_seconds(operators, 50) == pytest.approx(work * 1e-9 + 50e-6)
    assert rates(2e-9, 1e-6, is_cuda=True).pass_seconds(operators, 50) == pytest.approx(max(work * 1e-9, 50e-6))


def test_a_prediction_of_fused_attention() -> None:
    """4 heads of 40 rows: torch's kernel computes one block of 512 keys for each head. 40 rows take 2 + 36/60 ·
    6 ns per element."""
    model = stack(grouped(4, 2, 8), hidden_size=32, ffn=64, vocab_size=60)
    operators = GenerationRequest(model, 40, 1, 1, "fp32").operators(Mode("uncached"), 0)
    attention = [op for op in operators if op.name == "attention"]
    assert rates(0.0, 0.0).pass_seconds(attention, 0) == pytest.approx(4 * 40 * 2 * 8 * (2e-9 + (40 - 4) / 60 * 6e-9))


def test_the_predicted_saving_grows_with_length() -> None:
    """GPT-2 with invented rates: the prompt takes equal time in both modes, and a cache saves more if the answer is longer."""
    request = GenerationRequest(load_model("gpt2"), 64, 300, 1, "fp32")
    assert request.rows == {1, 8, 32, 64, 363}  # three fixed numbers, the prompt, and all tokens before the last

    def seconds(mode: str) -> list[float]:
        return [rates(1e-9, 1e-6).pass_seconds(request.operators(Mode(mode), step), 500) for step in range(300)]

    cached, again = seconds("cached"), seconds("uncached")
    assert cached[0] == again[0]  # the prompt
    savings = [sum(again[:new]) / sum(cached[:new]) for new in (50, 100, 300)]
    assert savings == sorted(savings)
    assert savings[1] > 2


def test_an_interruption_keeps_the_tokens_that_all_modes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in the fourth step of the second mode, each mode has three tokens."""
    real: Callable[[Any], None] = generation.GenerationRun.step

    def step(self: Any) -> None:
        if self.mode.name == "uncached" and len(self.seconds) == 3:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(generation.GenerationRun, "step", step)
    records = []
    with pytest.raises(KeyboardInterrupt):
        for record in run_generation(GenerationRequest(GPT, 5, 12, 1, "fp64"), MACHINE, GPU, quiet):
            records.append(record)
    stopped = [(r["mode"], r["new_tokens"], len(r["token_s"]), r["same_tokens"]) for r in records]
    assert stopped == [(mode.name, 3, 3, True) for mode in MODES]


@pytest.mark.parametrize("name", ["mqa", "gqa", "mla", "dsa:24+8+16@8", "window:8", "cla", "recurrent", "hybrid:2/window:8"])
def test_variants_of_a_whole_decoder(name: str) -> None:
    """The variant is in every layer, other parts do not change, and outputs are equal with and without a cache."""
    base = stack(grouped(8, 8, 8), layers=4, hidden_size=WIDTH, vocab_size=60)
    model = variant_model(base, name)
    assert (model.layers, model.vocab_size, model.hidden_size) == (4, 60, WIDTH)
    torch.manual_seed(5)
    records = list(run_generation(GenerationRequest(model, 4, 6, 1, "fp64", name), MACHINE, GPU, quiet))
    assert all(r["same_tokens"] and r["variant"] == name for r in records)


def test_generations_that_cannot_be() -> None:
    with pytest.raises(UserError, match="32 positions"):
        check(GenerationRequest(GPT, 20, 14, 1, "fp32"), MACHINE)
    with pytest.raises(UserError, match=r"needs 1.4\d TiB"):
        check(GenerationRequest(load_model("llama-3.1-405b"), 1, 1, 1, "fp32"), MACHINE)
