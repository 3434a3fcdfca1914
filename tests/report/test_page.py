"""The page to send: whole in itself, its sliders' integers those of the commands, names from files escaped."""

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from kvcalc import deploy
from kvcalc.answers.page import slider_data
from kvcalc.capacity import FitOptions, fit
from kvcalc.report.charts.drawing import in_style, render

LINES = [
    ("llama-3.1-8b --gpu h100", "llama-3.1-8b", "--gpu h100 --engine vllm"),
    ("gemma-3-27b --gpu h200 --engine sglang --kv-cache-dtype fp8", "gemma-3-27b --kv-cache-dtype fp8",
     "--gpu h200 --engine sglang"),
    ("deepseek-v3.2 --gpu h200 --tp 8 --engine none", "deepseek-v3.2 --tp 8", "--gpu h200 --engine none"),
    ("qwen3-next-80b-a3b --gpu h200 --tp 2 --dp 2", "qwen3-next-80b-a3b --tp 2 --dp 2", "--gpu h200 --engine vllm"),
    ("llama-3.1-405b --gpu h100", "llama-3.1-405b", "--gpu h100 --engine vllm"),
]  # fmt: skip


def written(kvcalc: Run, line: str, folder: Path) -> str:
    target = folder / "page.html"
    found = kvcalc(f"report {line} -o {target}")
    assert (found.code, found.out) == (0, "") and found.err.endswith(f"wrote {target}\n"), found.err
    return target.read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    found: dict[str, Any] = json.loads(match[1])
    return found


def rows(span: str, ratio: int, limit: int, tokens: int) -> int:
    """As the page's script has it."""
    match span:
        case "state":
            return limit
        case "partial":
            return tokens % ratio
        case "overlap":
            return ratio if tokens >= ratio else 0
    return min(tokens // ratio, limit) if limit else tokens // ratio


ASKED = [
    ("llama-3.1-8b", "h100", {}, "vllm"), ("gemma-3-27b", "h200", {"kv_cache_dtype": "fp8"}, "sglang"),
    ("deepseek-v3.2", "h200", {"tp": 8}, "none"), ("deepseek-v4-flash", "h200", {"tp": 8}, "none"),
    ("qwen3-next-80b-a3b", "h200", {"tp": 2, "dp": 2}, "vllm"), ("llama-3.1-405b", "h100", {}, "vllm"),
    ("llama-3.1-8b", "h100", {}, "llama.cpp"),
]  # fmt: skip


def test_the_dark_picture_is_the_light_one_in_its_colours() -> None:
    """What the page makes of one drawing is what drawing it anew gives, but for names that SVG refers to."""

    def plain(svg: str) -> str:
        names: dict[str, str] = {}
        return re.sub(r'(id="|url\(#|href="#)([^")]+)', lambda m: m[1] + names.setdefault(m[2], str(len(names))), svg)

    charts = [*deploy("gpt-oss-20b", "h100").compare("mha,mqa")._charts(), *deploy("gpt2", "h100").fit()._charts()]
    for chart in charts:
        light, dark = (render(chart, "svg", style).decode() for style in ("light", "dark"))
        assert plain(in_style(light, "dark")) == plain(dark) != plain(light)


@pytest.mark.parametrize(("model", "gpu", "how", "engine"), ASKED, ids=[f"{m} {e}" for m, _, _, e in ASKED])
def test_the_sliders_say_what_size_and_fit_say(model: str, gpu: str, how: dict[str, Any], engine: str) -> None:
    deployment, rng = deploy(model, gpu, **how), random.Random(model)
    data = slider_data(deployment, fit(deployment, FitOptions(engine=engine)))
    for _ in range(12):
        tokens, users = round(2 ** rng.uniform(0, 20)), round(2 ** rng.uniform(0, 9))
        one = sum(each * -(-rows(span, ratio, limit, tokens) // spread) for span, ratio, limit, spread, each in data["entries"])
        assert one * -(-users // data["dp"]) == deployment.size(tokens, users).stored
        room = sum(longest is None or longest >= tokens for longest in data["longest"])
        told = deployment.fit(max_model_len=tokens, engine=engine).max_num_seqs
        assert room * data["dp"] == told or (room == data["most"] and told >= room * data["dp"])


def test_the_page_needs_nothing_else_and_escapes_names_from_files(kvcalc: Run, tmp_path: Path) -> None:
    source = Path(__file__).parent.parent.parent / "presets" / "models" / "llama-3.2-1b.yaml"
    mine = tmp_path / "mine.yaml"
    text = re.sub(r"^name: .*$", "name: '<b>&</b></script>'", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    mine.write_text(text, encoding="utf-8")
    page = written(kvcalc, f"{mine} --gpu h100", tmp_path)
    assert "<b>" not in page and page.count("</script>") == 2
    assert not re.search(r'(?:src|href)="(?!#|data:)', page) and "url(http" not in page and "@import" not in page
    names = re.findall(r' id="([^"]*)"', page)
    assert len(names) == len({*names})
    assert {*re.findall(r"url\(#([^)]*)\)", page), *re.findall(r'href="#([^"]*)"', page)} <= {*names}
    assert "<!-- " not in page
    data = data_of(page)
    assert data["asked"] == [8192, 8] and data["dp"] == 1
    for command in re.findall(r"<code>(.*?)</code>", page):
        assert kvcalc(html.unescape(re.sub("</?span>", "", command)).removeprefix("kvcalc ")).code == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("report llama-3.1-8b --pp 2 -o x.html", "one pipeline stage"),
        ("report llama-3.1-8b --gpu h100,h200 -o x.html", "one deployment"),
        ("report llama-3.1-8b --context 1k,2k -o x.html", "is not a whole number"),
        ("report llama-3.1-8b --engine vlm -o x.html", "vllm"),
        ("report llama-3.1-8b -o /", "is a folder"),
    ],
)
def test_what_cannot_be_a_page_is_one_line_and_no_file(
    kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = kvcalc(line)
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1) and said in found.err
    assert not [*tmp_path.iterdir()]


CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
            "--disable-background-networking", "--disable-sync", "--enable-logging=stderr",
            "--virtual-time-budget=5000"]  # fmt: skip


@pytest.mark.browser
@pytest.mark.parametrize(("line", "size", "fit"), LINES, ids=[line for line, *_ in LINES])
def test_in_a_browser(kvcalc: Run, tmp_path: Path, line: str, size: str, fit: str) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser, "no Chromium on the path"
    page, rng = written(kvcalc, line, tmp_path), random.Random(line)
    points = [(round(2 ** rng.uniform(0, 20)), round(2 ** rng.uniform(0, 9))) for _ in range(50)]
    script = f"""<script>const out = []; for (const [t, u] of {json.dumps(points)}) {{
      for (const [id, v] of [["tokens", t], ["users", u]]) {{ at(id).value = v; at(id).dispatchEvent(new Event("input")) }}
      out.push([at("cache").textContent, at("fits").textContent]) }}
      document.body.innerHTML = "<pre>" + JSON.stringify(out) + "</pre>"</script></body>"""
    target = tmp_path / "driven.html"
    target.write_text(page.replace("</body>", script), encoding="utf-8")
    words = [browser, *CHROMIUM, f"--user-data-dir={tmp_path}/profile", "--dump-dom", target.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    match = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert match
    for (tokens, users), (cache, room) in zip(points, json.loads(html.unescape(match[1])), strict=True):
        shown = kvcalc(f"size {size} --context {tokens} --batch-size {users} --format json").records[0]
        assert f"({shown['kv_cache_bytes']:,} bytes)" in cache
        told = kvcalc(f"fit {size} {fit} --max-model-len {tokens} --format json").records[0]["max_num_seqs"]
        assert "or more" in room or int(room.split()[0].replace(",", "")) == told
