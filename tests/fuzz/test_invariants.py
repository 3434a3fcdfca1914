"""Figures of different answers agree for random requests: a figure used as input of another command, and the output formats."""

import csv
import io
import json
from typing import Any

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from program import MANY, hold, run, sound
from test_command_lines import GPUS, MODELS

import kvcalc
from kvcalc import UserError

FEW = 15
models, lengths = st.sampled_from(MODELS), st.sampled_from([1, 7, 100, 1024, 4096, 31_000])
gpus = st.sampled_from(GPUS)
each_count = pytest.mark.parametrize("count", [FEW, MANY])


def records(*words: object) -> list[dict[str, Any]]:
    """Return the records of a run. Refused requests are not part of the case."""
    done = sound(run(*map(str, words), "--format", "json"))
    assume(done.code != 2)
    return done.records


@each_count
def test_what_fits_plugs_into_itself(count: int) -> None:
    """With a given budget, max_num_seqs sequences of a length fit and one more does not. The same number fits at
    the longest context for it."""

    def check(model: str, length: int, budget: int, engine: str) -> None:
        assume(not kvcalc.load_model(model).pooling)  # an encoder stores no cache
        asked = "fit", model, "--gpu", "b200", "--engine", engine, "--kv-cache-memory-bytes", budget
        (first,) = records(*asked, "--max-model-len", length)
        users = first["max_num_seqs"]
        assume(users and users < 10**6)
        for many, fits in ((users, True), (users + 1, False)):
            (again,) = records(*asked, "--max-model-len", length, "--max-num-seqs", many)
            assert again["fits"] == fits
            if again["max_model_len"] and fits:
                (held,) = records(*asked, "--max-model-len", again["max_model_len"], "--max-num-seqs", many)
                assert held["fits"] and held["max_num_seqs"] >= many

    hold(check, count, models, lengths, st.integers(1 << 28, 1 << 36), st.just("none"))


@each_count
def test_every_format_holds_the_same(count: int) -> None:
    def check(model: str, context: int, batch: int) -> None:
        assume(kvcalc.load_model(model).dtype != "fp32")  # a deployment has the dtype in which its engine loads it
        words = "size", model, "--context", str(context), "--bs", str(batch)
        (record,) = records(*words)
        (row,) = csv.DictReader(io.StringIO(sound(run(*words, "--format", "csv")).out))
        assert {k: "" if v is None else str(v) for k, v in record.items()} == row
        assert run(*words, "--format", "json")[:4] == run(*words, "--format", "json")[:4], "the same again"
        (api,) = kvcalc.deploy(model, "h100").size(context, batch).records()
        assert json.loads(json.dumps(api)) == record

    hold(check, count, models, lengths, st.integers(1, 300))


@each_count
def test_the_api_answers_as_the_command_line_does(count: int) -> None:
    def check(model: str, gpu: str, tp: int, length: int) -> None:
        try:
            deployed = kvcalc.deploy(model, gpu, tp=tp)
            answers = (
                deployed.fit(max_model_len=length).records(),
                deployed.roofline("decode", batch_size=2, context=length).records(),
            )
        except UserError as error:
            done = sound(run("fit", model, "--gpu", gpu, "--tp", str(tp), "--max-model-len", str(length)))
            timed = sound(run("roofline", model, "--gpu", gpu, "--tp", str(tp), "--context", str(length), "--bs", "2"))
            assert f"kvcalc: {error}\n" in (done.err + timed.err)
            return
        printed = (
            records("fit", model, "--gpu", gpu, "--tp", tp, "--max-model-len", length),
            records("roofline", model, "--gpu", gpu, "--tp", tp, "--context", length, "--bs", 2),
        )
        assert json.loads(json.dumps(answers)) == json.loads(json.dumps(printed))

    hold(check, count, models, gpus, st.sampled_from([1, 2, 8]), lengths)


@each_count
def test_totals_bounds_and_sums(count: int) -> None:
    """A pass is the sum of its operators. No time is below its bound, for any dtype, phase and stack."""

    def check(model: str, gpu: str, phase: str, dtype: str, length: int, batch: int) -> None:
        words = "--gpu", gpu, "--phase", phase, "--dtype", dtype, "--context", length, "--bs", batch
        *parts, total = records("roofline", model, *words)
        for key in ("flops", "vector_flops", "bytes", "weight_bytes", "cache_bytes", "activation_bytes", "network_bytes"):
            assert total[key] == sum(part[key] for part in parts), key
        for row in (*parts, total):
            assert row["time_s"] is None or row["time_s"] >= row["roofline_s"] * (1 - 1e-9), row

    timed = st.sampled_from(["h100-sxm", "h200", "b200", "a100-80gb"])
    slow = st.sampled_from(
        [m for m in MODELS if m.startswith(("gemma-2", "olmo-2", "smollm", "starcoder2", "deepseek-v4", "falcon-h"))]
    )
    phases, dtypes = st.sampled_from(["decode", "prefill"]), st.sampled_from(["auto", "fp32", "fp8"])
    hold(check, count, slow | models, timed, phases, dtypes, lengths, st.sampled_from([1, 64]))


@each_count
def test_a_request_is_its_first_token_and_the_rest(count: int) -> None:
    def check(model: str, prompt: int, answer: int, batch: int) -> None:
        assume(not kvcalc.load_model(model).pooling)  # an embedder generates no tokens
        (one,) = records("latency", model, "--gpu", "h200", "--isl", prompt, "--osl", answer, "--bs", batch)
        assert one["e2e_s"] == pytest.approx(one["ttft_s"] + (answer - 1) * (one["tpot_s"] or 0), rel=1e-9)
        (longer,) = records("latency", model, "--gpu", "h200", "--isl", prompt, "--osl", answer + 1, "--bs", batch)
        assert longer["e2e_s"] > one["e2e_s"] and longer["flops"] > one["flops"] and longer["ttft_s"] == one["ttft_s"]

    hold(check, count, models, lengths, st.integers(1, 50), st.sampled_from([1, 16]))


@each_count
def test_more_tokens_sequences_or_shards(count: int) -> None:
    """Stored bytes grow with tokens and are proportional to sequences. A rank stores its share to everything."""

    def check(model: str, length: int, more: int, batch: int, tp: int) -> None:
        at, beyond = (records("size", model, "--context", n)[0]["kv_cache_bytes"] for n in (length, length + more))
        assert beyond >= at or model.startswith("deepseek-v4")  # a full block of a compressor is emptied
        assert records("size", model, "--context", length, "--bs", batch)[0]["kv_cache_bytes"] == batch * at
        (cut,) = records("size", model, "--context", length, "--tp", tp)
        assert at <= tp * cut["kv_cache_bytes"] <= tp * at

    hold(check, count, models, lengths, st.integers(1, 5000), st.integers(1, 100), st.sampled_from([1, 2, 4]))


@each_count
def test_a_simulated_server_loses_nothing(count: int) -> None:
    def check(model: str, policy: str, cache: str, prompts: int, seed: int) -> None:
        words = "--num-prompts", prompts, "--isl", "uniform:1,300", "--osl", "uniform:1,20", "--rate", 5, "--seed", seed
        asked = "serve", model, "--gpu", "b200", "--policy", policy, "--cache", cache, *words
        first, again = records(*asked)[0], records(*asked)[0]
        assert first == again
        assert first["completed"] + first["rejected"] == first["requests"] == prompts

    hold(check, count // 5, models, st.sampled_from(["static", "continuous"]), st.sampled_from(["paged", "contiguous"]),
         st.integers(1, 12), st.integers(0, 99))  # fmt: skip
