"""Models by name, with a local server and the real client in separate processes.

The server imitates the Hub, ModelScope, Ollama's registry and a plain file server. It has only headers of weight files,
and counts the bytes that it sends.
"""

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from conftest import Run

from kvcalc import Precision, UserError, fit, load_model, weight_bytes

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
BODY = json.dumps(CONFIG).encode()
COMMIT = "a" * 40
TOKEN = "hf_secret"
GB = 10**9
# What the Hub answers for a name: status, its X-Error-Code and message.
ANSWERS = {
    "org/missing": (401, "RepoNotFound", "Repository not found"),
    "org/absent": (404, "RepoNotFound", "Repository not found"),
    "org/gated": (401, "GatedRepo", "Access to model org/gated is restricted. You must be authenticated"),
    "org/refused": (403, "GatedRepo", "Access to model org/refused is restricted and you are not in the authorized list"),
    "org/forbidden": (403, "", "Forbidden"),
    "org/empty": (404, "EntryNotFound", "Entry not found"),
    "org/broken": (500, "", "Internal error"),
}
SLOW_S = 5.0


def safetensors(sizes: dict[str, int], **spoiled: Any) -> bytes:
    """Return the header of a file whose tensors have these bytes, one after the other. No tensor follows."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in sizes.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end := end + size]}
    text = json.dumps(entries | spoiled).encode()
    return struct.pack("<Q", len(text)) + text


LAYER_BYTES = {f"model.layers.{n}.mlp.weight": 3 * GB for n in range(2)}
# A tied head that is stored twice, a scale of a quantised matrix, a vision tower, and a layer beyond the model's two
HEADS = {"model.embed_tokens.weight": 5 * GB, "lm_head.weight": 5 * GB, "model.layers.1.mlp.scales": 700}
PARTS = {"model.visual.patch.weight": 1000, "model.layers.2.mlp.weight": 20}
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
INDEX = {"weight_map": dict.fromkeys(LAYER_BYTES, SHARDS[0]) | dict.fromkeys(HEADS | PARTS, SHARDS[1])}
GGUF = gguf_files.header(gguf_files.llama() | {"tokenizer.ggml.merges": ["ab"] * 40_000}, gguf_files.llama_tensors())
SPLITS = [
    gguf_files.header({"split.count": 2, **gguf_files.llama()}, dict(list(gguf_files.llama_tensors().items())[n::2]))
    for n in range(2)
]
GGUF_BYTES = sum(  # a super-block of 256 elements has 144 bytes as Q4_K and 210 as Q6_K; F32 has 4 bytes an element
    shape[0] * (shape[1] if len(shape) > 1 else 1) * {gguf_files.F32: 1024, 12: 144, 14: 210}[kind] // 256
    for shape, kind in gguf_files.llama_tensors().values()
)
MODEL_LAYER = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc", "size": 5 * GB}
LAYERS = [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:def"}, MODEL_LAYER]
QUANTS = ["q-Q4_K_M.gguf", "mmproj-Q8_0.gguf", "Q8_0/q-Q8_0-00001-of-00002.gguf"]
WHOLE = safetensors(LAYER_BYTES)
FILES = {
    "/org/single/resolve/main/model.safetensors": WHOLE,
    "/org/shards/resolve/main/model.safetensors.index.json": json.dumps(INDEX).encode(),
    f"/org/shards/resolve/main/{SHARDS[0]}": WHOLE,
    f"/org/shards/resolve/main/{SHARDS[1]}": safetensors(HEADS | PARTS),
    "/models/org/scope/resolve/master/config.json": BODY,
    "/models/org/scope/resolve/master/model.safetensors": WHOLE,
    "/org/gap/resolve/main/model.safetensors": safetensors(LAYER_BYTES, x={"data_offsets": [7 * GB, 8 * GB]}),
    "/org/long/resolve/main/model.safetensors": struct.pack("<Q", 1 << 62) + bytes(100),
    "/org/torn/resolve/main/model.safetensors": WHOLE[:50],
    "/org/outside/resolve/main/model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}',
    "/org/whole/resolve/main/model.safetensors": WHOLE,
    "/api/models/org/quants-GGUF/revision/main": json.dumps({"siblings": [{"rfilename": path} for path in QUANTS]}).encode(),
    "/org/quants-GGUF/resolve/main/q-Q4_K_M.gguf": GGUF,
    "/org/quants-GGUF/resolve/main/Q8_0/q-Q8_0-00001-of-00002.gguf": SPLITS[0],
    "/org/quants-GGUF/resolve/main/Q8_0/q-Q8_0-00002-of-00002.gguf": SPLITS[1],
    "/files/m.gguf": GGUF,
    "/files/text.gguf": b"<html>no model</html>",
    "/v2/library/qwen3/manifests/8b": json.dumps({"layers": LAYERS}).encode(),
    "/v2/library/qwen3/blobs/sha256:abc": GGUF,
    "/v2/me/mine/manifests/latest": json.dumps({"layers": LAYERS}).encode(),
    "/v2/me/mine/blobs/sha256:abc": GGUF,
    "/v2/library/parts/manifests/latest": b'{"layers": []}',
    "/v2/library/odd/manifests/latest": b'{"layers": 3}',
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """Answers requests for a path, with ranges. A weight file in `/org/whole/` has gigabytes and is sent from its beginning."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []
    sent: dict[str, int] = {}

    def do_GET(self) -> None:
        body = self.command == "GET"
        Hub.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        name, _, rest = path.lstrip("/").partition("/resolve/")
        status, code, message = ANSWERS.get(name, (200, "", ""))
        if rest.startswith("v9/"):
            status, code, message = 404, "RevisionNotFound", "Invalid rev id: v9"
        if name == "org/private" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, code, message = 401, "RepoNotFound", "Repository not found"
        if "org/slow" in name:
            time.sleep(SLOW_S)
        content = FILES.get(path, BODY if rest.endswith("/config.json") and status == 200 and name.startswith("org/") else None)
        if status == 200 and content is None:
            status, code, message = 404, "EntryNotFound", "Entry not found"
        content = content or b""
        if name == "org/no-json":
            content = b"<html>not a config</html>"
        span = self.headers.get("Range") if status == 200 and "whole" not in path else None
        self.send_response(206 if span else status)
        if span:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            self.send_header("Content-Range", f"bytes {first}-{last}/{9 * GB}")
            content = content[first : last + 1]
        for key, value in (("X-Error-Code", code), ("X-Error-Message", message), ("X-Repo-Commit", COMMIT)):
            if value:
                self.send_header(key, value)
        self.send_header("ETag", f'"{name.replace("/", "-")}"')
        self.send_header("Content-Length", str(9 * GB if "whole" in path and "safetensors" in path else len(content)))
        self.end_headers()
        if body and name == "org/cut":
            self.wfile.write(content[:30])
            self.close_connection = True
        elif body:
            self.wfile.write(content)
            Hub.sent[path] = Hub.sent.get(path, 0) + len(content)

    do_HEAD = do_GET

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


CHILD = """\
import json, sys
from kvcalc import UserError, load_model, weight_bytes
for name in sys.argv[1:]:
    try:
        m = load_model(name)
        print(json.dumps([m.name, m.huggingface_id, weight_bytes(m)]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def ask(names: list[str], home: Path, endpoint: str, **more: str) -> list[Any]:
    """Return for each name, in a new process, [name, id, bytes of the weights] of the model, or the text of the error."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    env = kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"KVCALC_OLLAMA_REGISTRY": endpoint, "MODELSCOPE_DOMAIN": endpoint} | more
    env |= {"HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    done = subprocess.run([sys.executable, "-c", CHILD, *names], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# q and o [64, 64], k and v [64, 16], FFN 3 · [64, 128], two norms, in 2 layers; embedding, head and last norm
BYTES = 2 * (2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 128 + 2 * 64) + 2 * 1000 * 64 + 64)


def test_found_in_every_spelling_and_then_offline_from_the_cache(endpoint: str, tmp_path: Path) -> None:
    names = ["hf:org/Found-8B", "org/Found-8B", "hf:org/Found-8B@v1"]
    assert ask(names, tmp_path, endpoint) == [["found-8b", "org/Found-8B", BYTES]] * 3
    before = len(Hub.asked)
    offline = ask(["org/Found-8B", "org/other"], tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert offline[0] == ["found-8b", "org/Found-8B", BYTES]
    assert offline[1] == "org/other is not in the Hub client's cache. HF_HUB_OFFLINE is set: unset it to fetch the file"
    assert len(Hub.asked) == before, "offline means no traffic"
    unreachable = ask(["org/Found-8B", "org/other"], tmp_path, "http://127.0.0.1:9")
    assert unreachable[0] == offline[0], "the client's cache serves while the Hub is away"
    assert "org/other cannot be read from the Hub: " in unreachable[1] and "HF_ENDPOINT" in unreachable[1]


def test_what_the_hub_refuses(endpoint: str, tmp_path: Path) -> None:
    said = dict(zip(names := [*ANSWERS, "org/found@v9", "org/no-json"], ask(names, tmp_path, endpoint), strict=True))
    for name in ("org/missing", "org/absent"):
        assert said[name] == f"the Hub has no public model {name}. Check the name; a private one needs HF_TOKEN"
    for name in ("org/gated", "org/refused"):
        assert said[name] == f"{name} is gated on the Hub. Ask for access there and set HF_TOKEN"
    assert said["org/empty"].startswith("org/empty has no config.json on the Hub")
    assert said["org/found@v9"] == "the Hub has no revision org/found@v9"
    for name in ("org/forbidden", "org/broken"):
        assert name in said[name] and ("403" in said[name] or "500" in said[name])
    assert "config.json: is not JSON" in said["org/no-json"]


def test_private_model_needs_the_token(endpoint: str, tmp_path: Path) -> None:
    assert "a private one needs HF_TOKEN" in ask(["org/private"], tmp_path / "a", endpoint)[0]
    assert ask(["org/private"], tmp_path / "b", endpoint, HF_TOKEN=TOKEN) == [["private", "org/private", BYTES]]


def test_slow_and_truncated_answers_end_in_an_error(endpoint: str, tmp_path: Path) -> None:
    for said in ask(["org/slow", "org/cut"], tmp_path, endpoint):
        assert "cannot be read from the Hub" in said
    assert not list(tmp_path.rglob("snapshots/*/config.json")), "nothing half-read is left in the cache"


def test_bytes_of_safetensors_are_those_of_the_headers(endpoint: str, tmp_path: Path) -> None:
    """The bytes of every tensor count, and only headers are sent."""
    Hub.sent.clear()
    names = ["org/single", "hf:org/single", "org/shards", "ms:org/scope", f"{endpoint.replace('http', 'https')}/org/x"]
    results = ask(names, tmp_path, endpoint)
    assert [result[2] for result in results[:4]] == [6 * GB, 6 * GB, 16 * GB + 700 + 1020, 6 * GB]
    assert results[3][0] == "scope" and "is neither a model's page" in results[4]
    assert all(sent % len(FILES[path]) == 0 for path, sent in Hub.sent.items() if path in FILES)
    offline = ask(["org/single", "ms:org/scope", "ollama:qwen3:8b"], tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert offline[0][2] == BYTES, "the config in the cache is read, and its weights are computed"
    assert all("HF_HUB_OFFLINE" in said for said in offline[1:])


def test_bytes_of_gguf_files_are_those_of_the_headers(endpoint: str, tmp_path: Path) -> None:
    names = ["org/quants-GGUF:q4_k_m", "org/quants-GGUF:Q8_0", f"{endpoint}/files/m.gguf?download=true"]
    names += [f"{endpoint}/org/quants-GGUF/blob/main/q-Q4_K_M.gguf", "ollama:qwen3:8b", "ollama:me/mine"]
    Hub.sent.clear()
    results = ask(names, tmp_path, endpoint)
    assert " ".join(result[0] for result in results) == "q-Q4_K_M q-Q8_0-00001-of-00002 m q-Q4_K_M qwen3:8b mine"
    assert {result[2] for result in results} == {GGUF_BYTES}
    assert Hub.sent["/files/m.gguf"] == len(GGUF), "nothing is read twice"


def test_other_refusals_are_one_sentence(endpoint: str, tmp_path: Path) -> None:
    refused = {
        "org/gap": "malformed safetensors header",
        "org/long": "malformed safetensors header",
        "org/torn": "malformed safetensors header",
        "org/outside": "names no usable safetensors files",
        "org/whole": "ignores ranges",
        "org/quants-GGUF:Q2_K": "has no GGUF file for 'Q2_K'. It has q-Q4_K_M.gguf",
        "ms:org/none": "ms:org/none has no config.json on ModelScope",
        "ollama:qwen3:70b": "ollama:qwen3:70b has no manifest on Ollama's registry",
        "ollama:parts": "has 0 GGUF files",
        "ollama:odd": "Ollama's registry sends no valid answer about ollama:odd",
        "ollama:../x": "is not a name of Ollama",
        f"{endpoint}/files/text.gguf": "does not begin with GGUF",
        f"{endpoint}/files/none.gguf": "has no none.gguf on 127.0.0.1",
    }
    Hub.sent.clear()
    for answer, said in zip(ask(list(refused), tmp_path, endpoint), refused.values(), strict=True):
        assert said in answer
    assert sum(Hub.sent.values()) < 20_000


def test_a_folder_with_safetensors_has_their_bytes(tmp_path: Path) -> None:
    """Vision tower and prediction layer are left out of the memory of a server that does not load them."""
    (tmp_path / "config.json").write_bytes(BODY)
    (tmp_path / "model.safetensors").write_bytes(safetensors(LAYER_BYTES | HEADS | PARTS))
    for place in (tmp_path, tmp_path / "config.json"):
        assert weight_bytes(load_model(place)) == 16 * GB + 700 + 1020
    model = load_model(tmp_path)
    assert weight_bytes(model, Precision(quantization="fp8")) < BYTES, "a typed format counts"
    record = fit(model, gpu="h200", max_model_len=64).records()[0]
    assert record["weight_bytes"] // 10**6 == 16_000, "with less than 1 MB of padding"
    (tmp_path / "model.safetensors").write_bytes(safetensors(LAYER_BYTES)[:-1])
    with pytest.raises(UserError, match="malformed"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["hf:../../x", "hf:a/../b", "hf:org/name@../x", "hf:org/name@", "hf:/etc/passwd", "hf:org", "hf:", "hf:a/b/c", "hf:a b/c"],
)
def test_what_is_no_name_is_refused_before_any_traffic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="is not a name on the Hub"):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("hf:meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "qwen3-8b"),
        ("hf.co/Qwen/Qwen3-8B", "qwen3-8b"),
    ],
)
def test_a_model_with_a_preset_needs_no_network(name: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert load_model(name) == load_model(preset)


def test_a_failure_names_the_preset_of_the_same_shape_or_similar_presets(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    same, near = kvcalc("size Qwen/Qwen3-14B-AWQ gpt2"), kvcalc("size allenai/Olmo-3-32B-New")
    assert (same.code, same.out, near.out) == (2, "", "") and same.err.endswith("--quantization awq needs no network\n")
    alone, preset = kvcalc("size Qwen/Qwen3-14B-AWQ"), kvcalc("size qwen3-14b -q awq")
    assert (alone.out, preset.err) == (preset.out, "") and alone.err.endswith("; read as qwen3-14b awq\n")
    assert near.err.endswith(" to fetch the file. Did you mean olmo-3.1-32b, olmo-2-32b?\n")
