"""Random errors in YAML questions, prices, saved corrections and logs give an answer or one line."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from program import MANY, hold, run, sound
from startup_logs import LLAMA_CPP, LLAMA_CPP_FAILED, NO_BLOCKS, SGLANG, SGLANG_FAILED, V0_7_3, V1_0_28
from test_files_spoiled import JUNK, PRESETS, spoiled

QUESTION = b"users: 3\ncontext: 2k\ngpu: [h100, l4]\nmax_tpot: 50ms\nmax-gpus: 4\nprice_per_hour: {h100: 2.5, l4: 0.7}\n"
TRAFFIC = b"rate: 2\ninput_len: 100\noutput_len: 5\ngpu: h100\ntp: 1,2\nkv_cache_dtype: [auto, fp8]\nmax_ttft: 1s\n"
LEARNED = (
    b"engine: 'vllm'\ngpu: 'h100-sxm'\nmemory_bytes: 85017755648\nmodel: 'gpt2'\nparameters: 124439808\nweights_in: 'bf16'\n"
    b"tensor_parallel_size: 1\npipeline_parallel_size: 1\nversion: '0.11.0'\n"
    b"weights_beyond_bytes: 1000000\nbeside_beyond_bytes: -5\nothers_bytes: 9\n"
)
TEXTS: dict[str, tuple[str, list[bytes], list[str]]] = {
    "learned": ("learned.yaml", [LEARNED], ["fit gpt2 --gpu h100 --from-log {} --format json", "fit gpt2 --from-log {}"]),
    "logs": (
        "server.log",
        [text.encode() for text in (SGLANG, SGLANG_FAILED, LLAMA_CPP, LLAMA_CPP_FAILED, NO_BLOCKS, V0_7_3, V1_0_28)],
        ["diagnose {} --format json", "diagnose {} --gpu h100 --users 3 --context 4k", "diagnose {} --model gpt2 --gpu l4"],
    ),
    "engine": (
        "engines/vllm.yaml",
        [(PRESETS / "engines" / "vllm.yaml").read_bytes()],
        ["latency gpt2 --format json", "serve gpt2 --num-prompts 3 --isl 9 --osl 3 --format json", "compare gpt2 --variants mqa"],
    ),
}
LINES = [
    "vllm serve gpt2 -tp 2 --max-model-len 512 --kv-cache-dtype fp8 --gpu-memory-utilization=0.8",
    "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --max-num-seqs 16 --quantization fp8 --enable-prefix-caching",
    "python -m sglang.launch_server --model-path gpt2 --tp 2 --mem-fraction-static 0.8 --context-length 512",
    "llama-server -m gpt2 -c 512 -np 2 -ngl 99 -ctk q8_0 -ctv q8_0",
    "trtllm-serve gpt2 --tp_size 2 --max_seq_len 512 --kv_cache_free_gpu_memory_fraction 0.8",
    "500+4x1@4k",
    "gqa:8/window:4096/int8",
    "lognormal:100,900",
    "uniform:5,900",
    "auto",
]
ASKED = [
    "fit --gpu h100 --format json -- {}",
    "roofline gpt2 --batch {!r} --format json",
    "compare gpt2 --variants {!r} --format json",
    "serve gpt2 --num-prompts 4 --isl {!r} --osl 3 --format json",
    "fit gpt2 --lengths {!r} --format json",
    "size gpt2 --tp {!r} --format json",
    "size gpt2 --set {!r} --format json",
    "size {!r}",
    "fit gpt2 --gpu {!r}",
    "latency gpt2 --draft {!r} --isl 9 --osl 3",
    "size gpt2 --context {!r} --format csv",
    "plan gpt2 --users {!r} --context 99 --gpu h100 --format json",
    "fit gpt2 --memory {!r} --format json",
    "latency gpt2 --inter-node-bandwidth {!r} --isl 9 --osl 3",
    "serve gpt2 --num-prompts 3 --isl 9 --osl 3 --rate {!r} --format json",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    yield tmp_path


@pytest.mark.parametrize("count", [6, MANY])
@pytest.mark.parametrize("form", TEXTS)
def test_a_spoiled_text_is_read_or_refused_in_one_line(form: str, count: int, folder: Path) -> None:
    name, bases, commands = TEXTS[form]
    (folder / name).parent.mkdir(parents=True, exist_ok=True)

    def check(content: bytes, command: str) -> None:
        (folder / name).write_bytes(content)
        sound(run(*command.format(name).split()))

    hold(check, count, spoiled(bases), st.sampled_from(commands))


@st.composite
def values(draw: st.DrawFn) -> str:
    """Draw a value of an option, or another program's command line, with up to two changed words."""
    text = spoiled([line.encode() for line in LINES])
    value = draw(text).decode("utf-8", "surrogateescape")
    return draw(st.sampled_from([value, value, value, *JUNK])).replace("\0", "")


@pytest.mark.parametrize("count", [30, MANY])
def test_a_spoiled_value_is_read_or_refused_in_one_line(count: int, folder: Path) -> None:
    def check(value: str, asked: str) -> None:
        if "{!r}" in asked:
            words = shlex.split(asked.replace("{!r}", "VALUE"))
            words = [value if word == "VALUE" else word for word in words]
        else:
            words = [*asked.removesuffix(" {}").split(), *value.split()]
        sound(run(*words))

    hold(check, count, values(), st.sampled_from(ASKED))
