"""`diagnose --metrics`: Prometheus text of vLLM and of SGLang beside what `serve` predicts, from a file or one request."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from conftest import Run

from kvcalc import UserError
from kvcalc.diagnosis.prometheus import Histogram, read_metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 12.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.97
vllm:num_preemptions_total{engine="0",model_name="Qwen/Qwen3-8B"} 3.0
vllm:prefix_cache_queries_total{engine="0",model_name="Qwen/Qwen3-8B"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="Qwen/Qwen3-8B"} 250.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="Qwen/Qwen3-8B"} 60.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="Qwen/Qwen3-8B"} 40.0
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 50000.0
vllm:generation_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 10000.0
vllm:cache_config_info{block_size="16",engine="0",gpu_memory_utilization="0.9",num_gpu_blocks="4000"} 1.0
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="Qwen/Qwen3-8B"} 50.0
vllm:time_to_first_token_seconds_bucket{le="0.5",model_name="Qwen/Qwen3-8B"} 90.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="Qwen/Qwen3-8B"} 100.0
vllm:time_to_first_token_seconds_count{model_name="Qwen/Qwen3-8B"} 100.0
vllm:time_to_first_token_seconds_sum{model_name="Qwen/Qwen3-8B"} 22.0
vllm:inter_token_latency_seconds_count{model_name="Qwen/Qwen3-8B"} 1000.0
vllm:inter_token_latency_seconds_sum{model_name="Qwen/Qwen3-8B"} 8.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct"} 2.0
sglang:num_queue_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
sglang:token_usage{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.28
sglang:cache_hit_rate{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.61
sglang:num_requests_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 10.0
sglang:prompt_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 8000.0
sglang:generation_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 1000.0
sglang:time_to_first_token_seconds_count{model_name="meta-llama/Llama-3.1-8B-Instruct"} 10.0
sglang:time_to_first_token_seconds_sum{model_name="meta-llama/Llama-3.1-8B-Instruct"} 1.2
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.txt"
    path.write_text(VLLM, encoding="utf-8")
    return path


def test_what_a_server_says(text: Path) -> None:
    found = read_metrics(str(text))
    assert (found.engine, found.model, found.blocks, found.block_size) == ("vllm", "Qwen/Qwen3-8B", 4000, 16)
    assert found.values["requests"] == 100
    assert found.values["cache_usage"] == 0.97
    assert found.histograms["ttft"].mean == 0.22
    assert found.histograms["ttft"].quantile(0.5) == 0.1
    assert found.histograms["ttft"].quantile(0.7) == pytest.approx(0.3)
    assert found.histograms["ttft"].quantile(0.99) is None, "the last bucket has no end"
    assert found.histograms["tpot"].mean == 0.008
    assert Histogram((), 0, 0).quantile(0.5) is None


def test_beside_what_serve_predicts(kvcalc: Run, text: Path) -> None:
    """16 clients of 500 tokens in and 100 out, in 4,000 blocks of 16 tokens of 147,456 bytes: what `serve` says of them."""
    records = kvcalc(f"diagnose --metrics {text} --gpu h100 --format json").records
    figures = {r["figure"]: r for r in records}
    assert (records[0]["max_concurrency"], records[0]["input_len"], records[0]["output_len"]) == (16, 500, 100)
    assert figures["prefix hits"]["measured"] == 0.25
    line = "serve qwen3-8b --gpu h100 --max-concurrency 16 --num-prompts 200 --input-len 500 --output-len 100"
    (served,) = kvcalc(f"{line} --kv-cache-memory-bytes {4000 * 16 * 147456} --format json").records
    assert figures["TTFT p50"]["predicted"] == served["ttft_p50_s"]
    assert figures["TPOT mean"]["predicted"] == served["tpot_mean_s"]
    assert figures["cache used"]["predicted"] == served["kv_peak"]
    assert 15 * 38 <= 4000 * served["kv_peak"] <= 16 * 38  # ⌈600/16⌉ blocks a request, when nearly all end together
    assert figures["verdict"]["said"].endswith("the cache is too small for this load")
    split = kvcalc(f"diagnose --metrics {text} --gpu h100 --tp 2 --format json").records
    assert (records[0]["gpus"], split[0]["gpus"]) == (1, 2)
    assert "12 running, 4 waiting" in kvcalc(f"diagnose --metrics {text} --gpu h100").joined


def test_sglang(kvcalc: Run, text: Path) -> None:
    text.write_text(SGLANG, encoding="utf-8")
    found = kvcalc(f"diagnose --metrics {text} --gpu h100 --users 4")
    assert "61% of prompt tokens found in the cache; nothing waits" in found.joined
    assert "predicted for 4 clients, 800 tokens in and 100 out" in found.joined


def test_foreign_and_hostile_text(text: Path) -> None:
    for content in ("", "<html>no</html>", "go_gc 1\n", "vllm:x{" * 9999, "vllm:x{" + 'a="b",' * 900 + "} 1"):
        text.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="has no metrics of vLLM or SGLang"):
            read_metrics(str(text))


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A server that answers /metrics and keeps the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status = 404 if self.path == "/missing" else 200
            body = VLLM.encode() if self.path != "/endless" else b"x" * (9 << 20)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", asked
    running.shutdown()


def test_an_address_is_asked_once(server: tuple[str, list[str]]) -> None:
    address, asked = server
    assert read_metrics(address).values["running"] == 12
    assert asked == ["/metrics"]
    with pytest.raises(UserError, match="answers with status 404"):
        read_metrics(f"{address}/missing")
    with pytest.raises(UserError, match="sends more than 8,388,608 bytes"):
        read_metrics(f"{address}/endless")


def test_values_that_no_server_counts_are_passed_over(kvcalc: Run, text: Path) -> None:
    spoiled = re.sub(r"(num_requests_running\{.*\}) .*", r"\1 1e999", VLLM)
    text.write_text(re.sub(r"(cache_usage_perc\{.*\}) .*", r"\1 -4", spoiled), encoding="utf-8")
    assert not {"running", "cache_usage"} & set(read_metrics(str(text)).values)
    said = kvcalc("diagnose", "--metrics", str(text), "--gpu", "h100", "--tp", "2", "--format", "json").records[-1]["said"]
    assert " running" not in said and "% used" not in said
    text.write_text(re.sub(r"(num_requests_running\{.*\}) .*", r"\1 1e9", VLLM), encoding="utf-8")
    refused = kvcalc("diagnose", "--metrics", str(text), "--gpu", "h100")
    assert (refused.code, "concurrent requests are more than 10,000" in refused.err) == (2, True)
