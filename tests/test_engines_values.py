"""Engines as values: refused requests, remarks, and a user's engine of a few lines."""

from collections.abc import Sequence

import pytest
from conftest import Run
from specs import csa, fitted, grouped, of_kinds, one_kind

from kvcalc import Layer, Parallelism, UserError, load_gpu, load_model
from kvcalc.capacity.engines import ENGINES
from kvcalc.capacity.engines.engine import Defaults, Engine, EngineSettings, stage_by_stage
from kvcalc.capacity.engines.layout import CacheLayout, LayerCache, find_unsupported, stage_pages
from kvcalc.capacity.fit_records import fit_record
from kvcalc.layers.cache import CacheEntry, EvictionRule, Span

GIB = 2**30
H100 = load_gpu("h100")
PAGED = ("vllm", "sglang", "trtllm", "llama.cpp")


# What no engine here has pages for, by what its entries say.


K, V = CacheEntry("k", 2, 16), CacheEntry("v", 2, 16)
NEAR = tuple(CacheEntry(role, 2, 16, limit=9) for role in ("k", "v"))
LATENT, ROPE, INDEX = CacheEntry("latent", 1, 512), CacheEntry("rope_key", 1, 64), CacheEntry("index_key", 1, 128)
STATE = CacheEntry("recurrent_state", 2, 16, limit=3, span=Span.STATE)
CONV = CacheEntry("conv_state", 2, 16, limit=3, span=Span.STATE)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ((K, V), ""), (NEAR, ""), ((LATENT,), ""), ((LATENT, ROPE, INDEX), ""), ((K, V, INDEX), ""), ((CONV, CONV, STATE), ""),
        ((CacheEntry("k", 2, 16, span=Span.CHUNK, limit=8), CacheEntry("v", 2, 16, span=Span.CHUNK, limit=8)), ""),
        ((K,), "it stores k rows"), ((K, V, *NEAR), "it stores k + k + v + v rows"), ((INDEX,), "it stores index key rows"),
        ((K, LATENT), "it stores k + latent rows"), ((K, NEAR[1]), "its rows have different limits"),
        ((K, V, INDEX, INDEX), "it does not store one index key per token"),
        ((K, V, CacheEntry("index_key", 1, 128, limit=5)), "it does not store one index key per token"),
        ((K, V, CacheEntry("index_key", 1, 128, ratio=2)), "one index key row stands for 2 tokens"),
        ((K, V, STATE), "it stores states and rows of tokens"),
        ((CacheEntry("recurrent_state", 2, 16),), "it stores recurrent state rows"),
        ((K, V, CacheEntry("compressor", 1, 8, 4, span=Span.PARTIAL)), "it stores unfinished blocks"),
        ((CacheEntry("compressor", 1, 8, 4, span=Span.OVERLAP),), "it stores unfinished blocks"),
        ((CacheEntry("k", 2, 16, limit=4, eviction_rule=EvictionRule.SINKS), V), "it does not keep the last k rows"),
    ],
)  # fmt: skip
def test_entries_that_are_pages_and_those_that_are_not(entries: tuple[CacheEntry, ...], why: str) -> None:
    assert find_unsupported(entries) == why


def test_vllm_packs_no_keys_and_values_beside_compressed_latents() -> None:
    """vLLM's pages for compressed latents are for models that store nothing else. Only such a model has a layout."""
    said = "no memory rules of vLLM are known for inline. Use --engine none"
    kinds = {"near": Layer(parts=(csa(),)), "full": Layer(parts=(grouped(),))}
    with pytest.raises(UserError, match=said):
        fitted(of_kinds(kinds, layers=2, pattern=("near", "full"), max_context=4096), "vllm")
    assert fitted(of_kinds({"near": kinds["near"]}, layers=2, max_context=4096), "vllm").sequences > 0


def test_vllm_has_other_pages_for_latents_that_layers_share() -> None:
    with pytest.raises(UserError, match=r"stores deepseek-v4.1-flash in other pages than DeepSeek-V4, which are not modelled"):
        fitted(load_model("deepseek-v4.1-flash"), "vllm")


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_context_parallelism_without_rules_is_refused(engine: str) -> None:
    with pytest.raises(UserError, match=f"decode-context parallelism under {ENGINES[engine].title}"):
        fitted(one_kind(grouped(groups=1)), engine, ranks=Parallelism(tp=2, dcp=2))


def test_content_is_what_the_engine_stores(kvcalc: Run) -> None:
    """DeepSeek-V3.2 at 163,840 tokens: 61 layers of 1152 B of latents and 132 B of index keys; llama.cpp's first GPU has 8 layers."""
    (record,) = kvcalc("fit deepseek-v3.2 --engine vllm --gpu h200 --tp 8 --max-model-len 163840 --format json").records
    assert record["transfer_bytes"] == 163_840 * 61 * (1152 + 132) == 12_832_604_160
    assert record["blocks_per_request"] * record["bytes_per_block"] == record["transfer_bytes"]
    (llama,) = kvcalc("fit deepseek-v3.2 --engine llama.cpp --gpu h200 --tp 8 --max-model-len 163840 --format json").records
    assert llama["transfer_bytes"] == llama["kv_cache_allocated_bytes"] == 163_840 * 8 * 2 * (576 + 128)


def test_shared_caches_cross_a_link_once() -> None:
    """2 of 4 layers read the caches of the others: 2 · 128 B per token are stored, and cross the host link in a step."""
    kinds = {"own": Layer(parts=(grouped(),)), "sharer": Layer(parts=(grouped(),), shares_cache=True)}
    model = of_kinds(kinds, layers=4, pattern=("own", "sharer"), max_context=4096)
    record = fit_record(fitted(model, "none", max_model_len=100, kv_offloading_bytes=100 * 256 * 7 + 1))
    assert (record["offload_num_seqs"], record["offload_step_bytes"]) == (7, 7 * 100 * 256)


# An engine of one's own: everything that it needs is in the value.


class Paged(CacheLayout):
    """A layout with blocks of 32 tokens and equal layers."""

    block_size = 32

    def __init__(self, row: int) -> None:
        self.bytes_per_block = 32 * row

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        return sequences * -(-length // 32) * self.bytes_per_block


def _plan(layers: Sequence[LayerCache], ranks: Parallelism, settings: EngineSettings, stage: int) -> CacheLayout:
    return Paged(sum(count * part.row_bytes for part, count in stage_pages("Toy", layers, stage)))


TOY = Engine(
    name="toy", title="Toy", plan=stage_by_stage(_plan), defaults=lambda *asked: Defaults(100, 1, 0.9),
    dtypes=("bf16", "fp8"), utilization_basis="remaining",
)  # fmt: skip


def test_an_engine_is_a_value(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 layers of 4096 B per token, and 0.9 of the memory that remains after all terms and 0.7 GiB of context."""
    monkeypatch.setitem(ENGINES, "none", TOY)
    line = "fit llama-3.1-8b --engine none --max-model-len 1000 --weight-bytes 16GiB --activation-bytes 1GiB --overhead-bytes 0"
    (record,) = kvcalc(line + " --format json").records
    left = H100.memory_bytes - 7 * GIB // 10 - 17 * GIB
    assert record["kv_budget_bytes"] == int(left * 0.9)
    assert record["bytes_per_block"] == 32 * 32 * 4096
    assert record["max_num_seqs"] == record["kv_budget_bytes"] // (32 * 32 * 32 * 4096)
    assert (record["max_num_batched_tokens"], record["utilization_of"]) == (100, "remaining")
    assert "6. What fits" in kvcalc(line + " --explain").out
    assert "toy has no cache dtype 'q8_0'" in kvcalc(line + " --kv-cache-dtype q8_0").err
    assert "no memory rules of Toy are known for deepseek-v4-flash" in kvcalc("fit deepseek-v4-flash --engine none").err
    assert "Engines that do: vllm" in kvcalc(line + " --num-gpu-blocks-override 3").err
