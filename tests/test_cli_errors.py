"""Impossible requests give one line on stderr with the problem and a valid alternative, exit status 2, and no traceback."""

import pytest
from conftest import Run

from kvcalc.errors import list_few

ERRORS = [
    ("size llama-3.1-8x", "unknown model 'llama-3.1-8x'. Did you mean llama-3.1-8b, "),
    ("size qwen2.5:9b", "unknown model 'qwen2.5:9b'. Did you mean qwen3.5-9b?"),  # same family and size
    ("size qwen3-14b-awq -q fp8", "unknown model 'qwen3-14b-awq'. It is the preset qwen3-14b with --quantization awq"),
    ("plan gpt2 --users 1 --context 9 --gpu h100 --tp 1,0", "tp '0' is not a number of GPUs. Give a whole number from 1 up"),
    ("size ''", "the model's name is empty"),
    ("size", "no model is named. Name one (`kvcalc models` lists them), or give --layers,"),
    ("sise gpt2", "No such command 'sise'"),
    ("size gpt2 --contxt 4k", "--contxt"),
    ("size gpt2 --format xml", "unknown format 'xml'. Known: csv, json, markdown, table"),
    ("fit llama-3.1-8b --gpu 8xH100", "unknown gpu '8xH100'. Give one or more counts with --tp: --gpu h100-sxm --tp 8"),
    ("fit llama-3.1-8b --gpu h100x8", "unknown gpu 'h100x8'. Give one or more counts with --tp: --gpu h100-sxm --tp 8"),
    ("fit gpt2 --gpu-memory-utilization 90", "is not above 0 and at most 1. Write 0.9 for 90%"),
    ("compare gpt2 --variants gqa", "variant 'gqa' needs a number. Write gqa:8"),
    ("size gpt2 zzz-7b", "unknown model 'zzz-7b'. Use its Hugging Face name, such as OWNER/NAME, or a config.json;"),
    ("latency llama-3.1-8b --draft eagle9", "unknown model 'eagle9'. Name its folder or Hub name, as in --draft "),
    ("fit llama-3.1-8b --draft layers=1", "unknown model 'layers=1'. `kvcalc latency` and `kvcalc serve` take --draft layers=N"),
    ("fit llama-3.1-8b --mtp 1", "unknown model '1'. A switch such as --mtp takes no number"),
    ("fit gpt2 --engine vllm==0.14", "engine 'vllm==0.14' has a version. Write --engine vllm --engine-version 0.14"),
    ("fit gpt2-q5_k_m.gguf", "no such file or directory. The preset gpt2 with --quantization q5_k_m needs no file"),
    ("fit -- llama-server -m zzz.gguf", "There is no such file. Give its path, or a model with a llama.cpp format: -m qwen3-8b-q4_k_m.gguf"),
    ("latency gpt2 --gpu rtx-4070-super", "rtx-4070, rtx-4070-ti, rtx-5070-ti, rtx-4060-ti-16gb? A GPU without a preset is a file like `kvcalc gpus"),
    ("fit gpt2 --gpu ryzen-ai-9-hx-370", "CPUs have no presets: save a file with the keys name, vendor, memory_bytes, "),
    ("roofline gpt2 --batch 64", "For a number of sequences, use --batch-size"),
    ("size llama3.json", "llama3.json: cannot be read: no such file or directory. Did you mean llama-3"),
    ("fit -- ollama run gpt2", "Ollama runs llama.cpp; write `kvcalc fit MODEL -q q4_k_m --engine llama.cpp`"),
    ("size gpt4", "unknown model 'gpt4'. Its dimensions are not public; `kvcalc size --layers N "),
    ("size gpt2 --style dark", "style 'dark' needs a picture. Add --plot FILE"),
    ("fit gpt2 --kv-offloading-bytes 64", "kv-offloading-bytes '64' is 64 bytes. Write 64GiB"),
    ("fit llama-3.1-8b --memory 24", "memory '24' is 24 bytes. Write 24GiB"),
    ("fit llama-3.1-8b --context 8,000", "max-model-len '8,000' is a list. Write 8000 for one number"),
    ("size gpt2 --dtype int4", "unknown dtype 'int4'. Weights stored so are --quantization int4"),
    ("size gpt2 -q 4bit", "unknown quantization '4bit'. 4-bit formats: int4, awq, "),
    ("size gpt2 --layers 6", "Change a model with --set layers=6"),
    ("serve gpt2 --price-per-hour $2.50", "price of h100-sxm '$2.50' is not a number from 0 up"),
    ("plan gpt2 --users 1 --context 1k --price-per-hour h100:2.5", "price-per-hour 'h100:2.5' is not a price. Write h100=2.5,"),
    ("gpus ha100", "unknown gpu 'ha100'. Did you mean h100-sxm, a100-80gb"),
    *((f"size gpt2 --context {bad}", f"context '{bad}'") for bad in ("0", "-5", "nan", "inf", "1e3", "4.5", "4x", "10000g")),
    ("size gpt2 --context 4k,", "context '4k,' has an empty item"),
    *((f"size gpt2 --batch-size {bad}", f"batch-size '{bad}'") for bad in ("0", "-1", "x", "nan", "0.5")),
    ("latency gpt2 --prefix-len 15k --max-num-batched-tokens 8k", "a cached prefix of 15,360 tokens leaves no"),
    *((f"size gpt2 --block-size {bad}", f"block-size '{bad}'") for bad in ("0", "-16")),
    (f"fit gpt2 --memory {41 * '9'}", "is not a number of bytes"),
    ("latency gpt2 --cpu-offload-gb 1048577", "cpu-offload-gb 1048577.0 is not a number from 0 to 1,048,576"),
    ("size gpt2 --dtype bf61", "unknown dtype 'bf61'. Did you mean bf16"),
    ("size gpt2 --kv-cache-dtype fp7", "unknown KV-cache dtype 'fp7'. Did you mean fp8"),
    ("size gpt2 --kv-cache-dtype fp8_ds_mla", "is for latent attention, and gpt2 caches keys and values. Use fp8"),
    ("size gpt2 --quantization nvfp5", "unknown quantization 'nvfp5'. Did you mean nvfp4"),
    ("size gpt2 --set head_dim", "'head_dim' should read KEY=VALUE"),
    ("size gpt2 --set head_dimm=3", "no layer of gpt2 has 'head_dimm'. Did you mean head_dim"),
    ("size gpt2 --set head_dim=wide", "kinds.full.parts.0.head_dim: Expected 'int', got 'str'"),
    ("size gpt2 --set head_dim=0", "head_dim: Expected 'int' >= 1"),
    ("size gpt2 --set num_key_value_heads=5", "num_attention_heads 12 is not a multiple of num_key_value_heads 5"),
    ("size gpt2 --set ful.head_dim=3", "unknown layer kind 'ful'. Did you mean full"),
    ("size gpt2 --set dtype=fp13", "dtype: Invalid enum value 'fp13'"),
    ("size llama-3.1-8b/", "cannot be read: no such file"),
    ("size hf:nonsense", "'nonsense' is not a name on the Hub. Write hf:org/name"),
    ("compare gpt2 --variants gqa8", "unknown variant 'gqa8'. Known forms: mha, mqa, gqa:8"),
    ("compare gpt2 --variants gqa:5", "5 KV heads do not divide the 12 query heads of gpt2"),
    ("compare gpt2 --variants mla:x", "mla:x"),
    ("compare deepseek-v3 --variants window:4k", "does not cache plain keys and values. Begin with mha"),
    (f"size gpt2 --context {','.join(['1'] * 100_001)}", "100,001 rows of a table; the maximum is"),
    ("size gpt2 --context " + "9" * 5000, "context '999"),
    ("size '\x1b[31mred\x1b[0m'", "unknown model '"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), ERRORS, ids=[repr(line[:60]) for line, _ in ERRORS])
def test_error_is_one_line_with_status_2(kvcalc: Run, line: str, said: str) -> None:
    code, out, err = kvcalc(line)
    assert (code, out) == (2, "")
    assert err.startswith("kvcalc: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), "one line, and no escapes for the terminal"
    assert said in err
    assert len(err) < 1500


def test_context_beyond_the_models_own_is_computed_with_a_note(kvcalc: Run) -> None:
    code, out, err = kvcalc("size gpt2 --context 2k --format csv")
    assert code == 0
    assert err == "note: gpt2: context 2,048 is beyond the model's own maximum of 1,024\n"
    assert "75497472" in out  # 2 · 12 · 768 · 2 · 2048
    for line in ("compare gpt2 --context 2k", "roofline gpt2 --context 2k", "latency gpt2 --isl 2000 --osl 48"):
        assert kvcalc(line).err == err, line


def test_a_list_leaves_out_two_names_or_more() -> None:
    few = list_few("ABCDEF")
    assert ("E" in list_few("ABCDE"), "D" in few, "E" in few, "2" in few) == (True, True, False, True)
