"""Measured rows: the format, its aliases, and the treatment of broken rows."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.errors import UserError
from kvcalc.timing.rows import parse_number, read_rows

GEMM = "gpu,framework,version,dtype,m,n,k,time_us\n"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_stem_names_the_operation(tmp_path: Path) -> None:
    table = read_rows(written(tmp_path, "gemm.csv", GEMM + "h100_sxm,vllm,0.24.0,bfloat16,128.0,4096,1024,12.5\n"))
    (row,) = table.rows
    assert (row.op, row.gpu, row.framework, row.version) == ("gemm", "h100_sxm", "vllm", "0.24.0")
    assert row.shape == (128, 4096, 1024)
    assert row.time_us == 12.5
    assert not table.invalid


def test_a_column_op_mixes_operations_and_unknown_columns_pass(tmp_path: Path) -> None:
    text = (
        "row_id,op,system,backend,dtype,m,n,k,num_gpus,bytes,time_us\n"
        "a,gemm,h200_sxm,tensorrt-llm,fp8,1,2,3,,,4\n"
        "b,allreduce,h200_sxm,nccl,half,,,,8,1024,15.7\n"
    )
    first, second = read_rows(written(tmp_path, "mixed.csv", text)).rows
    assert (first.op, first.framework, first.dtype, first.shape) == ("gemm", "trtllm", "fp8", (1, 2, 3))
    assert (second.op, second.framework, second.dtype, second.shape) == ("allreduce", "nccl", "bfloat16", (8, 1024))


def test_serving_rows_are_in_milliseconds(tmp_path: Path) -> None:
    header = "backend,system,model_path,gemm_quant_mode,isl,osl,batch_size,tp_size,silicon_tpot_ms\n"
    text = header + "vllm,h100,a/b,,2048,512,64.0,8.0,19.458\n"
    (row,) = read_rows(written(tmp_path, "e2e_dense.csv", text)).rows
    assert row.time_us == pytest.approx(19458)
    assert (row.dtype, row.model) == ("bfloat16", "a/b")


MOE = "gpu,framework,dtype,kernel,tokens,hidden,inter,topk,experts,moe_tp,moe_ep,rank_rows,experts_touched"
TILES = ",".join(f"tiles_{m}" for m in (8, 16, 32, 48, 64, 128))


def test_rows_of_experts_bring_what_routing_put_on_the_rank(tmp_path: Path) -> None:
    header = f"{MOE},{TILES},kernel_family,odd,time_us\n"
    cells = "h100_sxm,vllm,fp8_block,vllm_fp8moe_triton,64,7168,2048,8,256,1,8,95.8,21.4,26,22.2,21.4,21.4,21.4,21.4"
    text = header + f"{cells},vllm fp8_block triton,0,99\n{cells},,1,99\n"
    first, second = read_rows(written(tmp_path, "moe.csv", text)).rows
    assert first.shape == (64, 7168, 2048, 8, 256, 1, 8, 95.8, 21.4, 26, 22.2, 21.4, 21.4, 21.4, 21.4)
    assert (first.dtype, first.kernel, first.is_excluded) == ("fp8_block", "vllm fp8_block triton", False)
    assert (second.kernel, second.is_excluded) == ("vllm_fp8moe_triton", True)


def test_rows_of_modules_take_their_widths_from_the_model_they_name(tmp_path: Path) -> None:
    header = "gpu,framework,kernel,model,kv_dtype,gemm_dtype,batch,q_heads,kv_len,time_us\n"
    text = (
        header
        + "h200,sglang,sglang_dsa_indexer_fa3,deepseek-ai/DeepSeek-V3.2,bfloat16,fp8_block,4,16,8192,99\n"
        + "h200,sglang,sglang_dsa_skip_indexer_fa3,zai-org/GLM-5.2-FP8,fp8,bfloat16,4,8,1,99\n"
        + "h200,sglang,x,openai-community/gpt2,fp8,bfloat16,4,8,1,99\n"
    )
    table = read_rows(written(tmp_path, "dsa_decode_module.csv", text))
    assert [row.shape for row in table.rows] == [
        (4, 16, 8192, 7168, 1536, 512, 64, 128, 128, 64, 128, 2048),
        (4, 8, 1, 6144, 2048, 512, 64, 192, 256, 0, 128, 2048),
    ]
    assert [row.dtype for row in table.rows] == ["bfloat16/fp8_block", "fp8/bfloat16"]
    assert table.invalid == ["line 4: model 'openai-community/gpt2' is no preset with sparse attention"]


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ("h100,vllm,1,bfloat16,0,1,1,5", "m '0'"),
        ("h100,vllm,1,bfloat16,nan,1,1,5", "m 'nan'"),
        ("h100,vllm,1,bfloat16,,1,1,5", "m is empty"),
        ("h100,vllm,1,bfloat16,x,1,1,5", "m 'x' is not a number"),
        ("h100,vllm,1,bfloat16,1,1,1,-5", "time_us '-5'"),
        ("h100,vllm,1,bfloat16,1,1,1", "time_us is empty"),
        ("h100,vllm,1,bfloat16,1,1,1,5,6", "has 9 fields, the header 8"),
        (f"h100,vllm,1,bfloat16,{'x' * 300},1,1,5", f"m '{'x' * 196}…"),  # 200 characters
    ],
)
def test_a_broken_row_is_named_by_line_and_kept_apart(tmp_path: Path, cells: str, why: str) -> None:
    good = "h100,vllm,1,bfloat16,1,1,1,5\n"
    table = read_rows(written(tmp_path, "gemm.csv", GEMM + good + cells + "\n" + good))
    assert len(table.rows) == 2
    (problem,) = table.invalid
    assert problem.startswith(f"line 3: {why}")
    assert len(table.cells) == 3


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("other.csv", GEMM, "no column op"),
        ("gemm.csv", "", "is empty"),
        ("gemm.csv", "gpu,m,n\n", "has no column k"),
        ("gemm.csv", GEMM + "a\0b\n", "NUL"),
    ],
)
def test_a_file_that_is_no_table_of_rows_is_refused(tmp_path: Path, name: str, text: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        read_rows(written(tmp_path, name, text))


@given(st.text("0123456789.,eE+-_ kx²∞", max_size=12))
def test_a_count_is_a_whole_number_or_a_value_error(text: str) -> None:
    try:
        value = parse_number(text, "m")
    except ValueError:
        return
    assert 1 <= value == int(value)
