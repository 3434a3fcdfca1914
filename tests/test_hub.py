"""`hf:org/name` against a Hub of our own on loopback, through the real client in processes of their own."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from kvcalc import UserError, load_model

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
BODY = json.dumps(CONFIG).encode()
COMMIT = "a" * 40
TOKEN = "hf_secret"
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


class Hub(BaseHTTPRequestHandler):
    """Answers `/{org}/{name}/resolve/{revision}/config.json` as the Hub does."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        Hub.asked.append(f"{self.command} {self.path}")
        name, _, rest = self.path.lstrip("/").partition("/resolve/")
        status, code, message = ANSWERS.get(name, (200, "", ""))
        if rest.startswith("v9/"):
            status, code, message = 404, "RevisionNotFound", "Invalid rev id: v9"
        if name == "org/private" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, code, message = 401, "RepoNotFound", "Repository not found"
        if name == "org/slow":
            time.sleep(SLOW_S)
        content = BODY if status == 200 else b""
        if name == "org/no-json":
            content = b"<html>not a config</html>"
        self.send_response(status)
        for key, value in (("X-Error-Code", code), ("X-Error-Message", message), ("X-Repo-Commit", COMMIT)):
            if value:
                self.send_header(key, value)
        self.send_header("ETag", f'"{name.replace("/", "-")}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and name == "org/cut":
            self.wfile.write(content[:30])
            self.close_connection = True
        elif body:
            self.wfile.write(content)

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
from kvcalc import UserError, load_model
for name in sys.argv[1:]:
    try:
        m = load_model(name)
        print(json.dumps([m.name, m.huggingface_id, m.parameters]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def ask(names: list[str], home: Path, endpoint: str, **more: str) -> list[Any]:
    """What a fresh process makes of each name: [name, id, parameters] of the model, or the error's text."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    env = kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"} | more
    env |= {"HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    done = subprocess.run([sys.executable, "-c", CHILD, *names], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# q and o [64, 64], k and v [64, 16], FFN 3 · [64, 128], two norms, in 2 layers; embedding, head and last norm
PARAMETERS = 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 128 + 2 * 64) + 2 * 1000 * 64 + 64


def test_found_in_every_spelling_and_then_offline_from_the_cache(endpoint: str, tmp_path: Path) -> None:
    names = ["hf:org/Found-8B", "org/Found-8B", "hf:org/Found-8B@v1"]
    assert ask(names, tmp_path, endpoint) == [["found-8b", "org/Found-8B", PARAMETERS]] * 3
    before = len(Hub.asked)
    offline = ask(["org/Found-8B", "org/other"], tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert offline[0] == ["found-8b", "org/Found-8B", PARAMETERS]
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
    assert said["org/empty"] == "org/empty has no config.json on the Hub"
    assert said["org/found@v9"] == "the Hub has no revision 'v9' of org/found"
    for name in ("org/forbidden", "org/broken"):
        assert name in said[name] and ("Forbidden" in said[name] or "500" in said[name])
    assert "config.json: is not JSON" in said["org/no-json"]


def test_private_model_needs_the_token(endpoint: str, tmp_path: Path) -> None:
    assert "a private one needs HF_TOKEN" in ask(["org/private"], tmp_path / "a", endpoint)[0]
    assert ask(["org/private"], tmp_path / "b", endpoint, HF_TOKEN=TOKEN) == [["private", "org/private", PARAMETERS]]


def test_slow_and_truncated_answers_end_in_an_error(endpoint: str, tmp_path: Path) -> None:
    for said in ask(["org/slow", "org/cut"], tmp_path, endpoint):
        assert "cannot be read from the Hub" in said
    assert not list(tmp_path.rglob("snapshots/*/config.json")), "nothing half-read is left in the cache"


def test_a_download_that_never_ends_is_given_three_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the longer of the client's two."""
    import huggingface_hub
    from huggingface_hub import constants

    from kvcalc.library.huggingface.hub import load_from_hub

    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_ETAG_TIMEOUT", 0.02), ("HF_HUB_DOWNLOAD_TIMEOUT", 0.01)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *words, **keys: time.sleep(1))
    with pytest.raises(UserError, match=r"org/name cannot be read from the Hub: TimeoutError: no whole answer within 0\.06 s"):
        load_from_hub("org/name")


@pytest.mark.parametrize(
    "name",
    ["hf:../../x", "hf:a/../b", "hf:org/name@../x", "hf:org/name@", "hf:/etc/passwd", "hf:org", "hf:", "hf:a/b/c", "hf:a b/c"],
)
def test_what_is_no_name_is_refused_before_any_traffic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="is not a name on the Hub"):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen/Qwen3-8B", "The preset qwen3-8b needs no network"),
        ("hf:meta-llama/Llama-3.1-8B-Instruct", "The preset llama-3.1-8b needs no network"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "The preset qwen3-8b needs no network"),
        ("Qwen/Qwen3-14B-AWQ", "The preset qwen3-14b with --quantization awq needs no network"),
        ("org/name", "pip install 'kvcalc[hub]'"),
    ],
)
def test_a_model_with_a_preset_is_named_where_the_hub_is_not_to_be_had(
    kvcalc: Run, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    found = kvcalc("size", name)
    assert (found.code, found.out) == (2, "") and found.err.startswith("kvcalc: reading ") and found.err.endswith(f"{said}\n")
