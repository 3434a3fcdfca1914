"""The work for a request is bounded: sizes have a stated limit, or a larger size costs no more. Streams are not stored."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from program import run, sound

from kvcalc.library.presets import shipped_folder
from kvcalc.report.export import json_pieces

DRAWN = {path.stem for path in (shipped_folder() / "models").glob("*.yaml")} - {"bge-large-en-v1.5", "bge-m3", "modernbert-base"}
PRESETS = sorted(DRAWN)[:121]
THOUSAND = ",".join(map(str, range(1, 1001)))
REFUSED = {
    ("size", "gpt2", "--context", THOUSAND, "--bs", THOUSAND, "--format", "json"): "1,000,000 rows; the maximum is",
    ("size", "gpt2", "--context", THOUSAND, "--bs", THOUSAND[:200]): "rows of a table; the maximum is 20,000",
    ("size", "gpt2", "--context", THOUSAND, "--bs", "1,2,3", "--explain"): "3,000 explanations; the maximum is",
    ("size", *["gpt2"] * 3000): "3,000 models; the maximum is",
    ("fit", "gpt2", "--gpu", ",".join(["h100"] * 3000)): "3,000 GPUs; the maximum is",
    ("fit", "llama-3.1-405b", "--pp", "126", "--max-num-seqs", "1,2,3,4,5,6,7,8"): "1,008 pipeline stages; the maximum is",
    ("roofline", "gpt2", "--context", THOUSAND, "--format", "json"): "1,000 passes; the maximum is 500",
    ("latency", "gpt2", "--isl", THOUSAND, "--osl", THOUSAND): "1,000,000 rows; the maximum is",
    (
        "latency",
        "gpt2",
        "--osl",
        "1000000000000",
    ): "1,000,000,000,000 tokens of an answer are more than the 1,048,576 that are timed",
    ("latency", "gpt2", "--osl", "2M"): "2,097,152 tokens of an answer are more than the 1,048,576 that are timed",
    ("latency", "gpt2", "--osl", "1M", "--batch-size", "1,2,3,4,5,6,7,8"): "8,388,616 passes of all requests are more than the",
    ("latency", "gpt2", "--osl", "1M", "--no-cache"): "without a cache are more than the 262,144 that are timed",
    ("latency", "gpt2", "--isl", "2M", "--max-num-batched-tokens", "1"): "2,097,152 chunks of the prompt are more than",
}


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(words)[:40])
def test_lists_have_limits_that_are_said(words: tuple[str, ...]) -> None:
    done = sound(run(*words))
    assert (done.code, done.seconds < 1) == (2, True)
    assert REFUSED[words] in done.err


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--isl 64k --max-num-batched-tokens 1", "--osl 1M"])
def test_long_requests_take_little(more: str) -> None:
    assert sound(run("latency", "deepseek-v4-pro", *more.split(), "--format", "json")).records[0]["e2e_s"] > 10


def test_records_are_printed_as_they_are_made() -> None:
    made = []

    def records() -> Iterator[dict[str, int]]:
        for number in range(10**9):
            made.append(number)
            yield {"a": number, "b": 2}

    printed = "".join(islice(json_pieces(records()), 3))
    assert len(made) <= 3
    assert '"a": 2' in printed


MUCH = "1000000000000"
PICTURED = {
    f"size gpt2 --context {MUCH} --bs {MUCH}": 0,
    f"plot memory gpt2 --context {MUCH} --batch-size {MUCH}": 0,
    f"plan gpt2 --gpu h100 --users {MUCH} --context {MUCH}": 1,  # nothing fits, so there is nothing to draw
    "latency gpt2 --isl 1 --osl 1": 2,  # no time per token to draw
    "size bge-m3 gpt2": 0,  # an embedder without a cache
}


@pytest.mark.parametrize("target", ["-", "out.svg"])
@pytest.mark.parametrize("words", PICTURED)
def test_pictures_of_anything(words: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = sound(run(*words.split(), "--plot", target))
    assert (done.code, (tmp_path / "out.svg").exists()) == (PICTURED[words], target == "out.svg" and not PICTURED[words]), done


def test_kinds_of_layers_have_a_limit(tmp_path: Path) -> None:
    """The maximum number of kinds is fast. One more kind is refused, and the message has the number."""
    part = "{parts: [{type: grouped, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, sliding_window: "
    for count, code in ((256, 0), (257, 2)):
        kinds = "".join(f"  k{i}: {part}{i + 1}}}]}}\n" for i in range(count))
        text = f"name: m\nfamily: m\nhidden_size: 64\nvocab_size: 10\nlayers: 1000\npattern: [k0]\nkinds:\n{kinds}"
        (tmp_path / "m.yaml").write_text(text, encoding="utf-8")
        done = sound(run("size", str(tmp_path / "m.yaml")))
        assert (done.code, "kinds: Expected 'object' of length <= 256" in done.err) == (code, code == 2), done.err


@pytest.mark.parametrize(("words", "count"), [("size", 17), ("plot cache-vs-context", 17), ("plot cache-vs-parameters", 121)])
def test_pictures_of_more_than_can_be_told_apart(words: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the layout grows at most with the square of the number of names."""
    monkeypatch.chdir(tmp_path)
    done = sound(run(*words.split(), *PRESETS[:count], "--plot", "out.svg"))
    said = f"{count} {'points with names' if count > 100 else 'curves'} are more than the {count - 1} that a picture shows. "
    assert (done.code, said in done.err, [*tmp_path.iterdir()]) == (2, True, []), done
