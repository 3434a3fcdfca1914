"""Invalid arguments of the Python API give a UserError that names the problem, without a traceback. Methods of answers."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcalc
from kvcalc import UserError, deploy

D = deploy("gpt2", "h100")


def deployed(**options: Any) -> Any:
    return deploy("gpt2", "h100", **options)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: D.size("abc"), "context 'abc' is not a whole number"),
    (lambda: D.size(batch_size=0), "batch-size '0'"),
    (lambda: D.fit(max_num_seqs="x"), "max-num-seqs 'x'"),
    (lambda: D.fit(max_model_le=3), "unknown option 'max_model_le'. Did you mean max_model_len"),
    (lambda: deployed(tensor_parallel_size=2), "unknown option 'tensor_parallel_size'. Did you mean tp"),
    (lambda: D.fit(context="8k"), "unknown option 'context'. Did you mean max_model_len"),
    (lambda: deployed(dtpe="fp8"), "unknown option 'dtpe'. Did you mean dtype"),
    (lambda: D.fit(lengths=5), "lengths 5: Expected `str`"),  # type: ignore[arg-type]
    (lambda: D.serve(rate="x"), "rate 'x'"),
    (lambda: D.compare(5), "variants 5: Expected `str`"),  # type: ignore[arg-type]
    (lambda: deployed(tp="four"), "tp 'four' is not a number of GPUs"),
    (lambda: deployed(tp=[1, 2]), "a deployment has one value of each option. Call deploy once for each"),
    (lambda: deployed(nodes="two"), "nodes 'two' is not a whole number"),
    (lambda: deployed(tp=16, nodes=1), "one link joins 8 h100-sxm, but a node has 16"),
    (lambda: deploy("gpt2", None), "None is no name of a GPU"),  # type: ignore[arg-type]
    (lambda: deploy("gpt22", "h100"), "unknown model 'gpt22'. Did you mean gpt2"),
    (lambda: D.size(4096).plot("x"), "unknown style 'x'"),
    (lambda: kvcalc.cache_size(3, 4096), "3 is no name of a model"),  # type: ignore[arg-type]
    (lambda: kvcalc.cache_size("gpt2", "4x"), "context '4x'"),
    (lambda: kvcalc.cache_size("gpt2", 4096, precision="fp8"), "'fp8' is no Precision"),  # type: ignore[arg-type]
    (lambda: kvcalc.Batch.decode("x"), "context 'x' is neither"),  # type: ignore[arg-type]
    (lambda: kvcalc.bounds([3], "h100"), "3 is no Operator"),  # type: ignore[list-item]
    (lambda: kvcalc.size(D, tp=2), "the deployment already has tp. Give these options to deploy"),
    (lambda: kvcalc.load_model(3), "3 is no name of a model"),  # type: ignore[arg-type]
    (lambda: kvcalc.Parallelism(per_node=-1), "per_node -1"),
    (lambda: kvcalc.plan("gpt2", users="x", context="4k"), "users 'x'"),
    (lambda: kvcalc.plan("gpt2", users=1, context=512, min_throughput=2e12), "min-throughput 2000000000000"),
    (lambda: kvcalc.plan([], users=3, context="4k"), "a plan takes a model"),
    (lambda: kvcalc.plan(None, users=3), "None is no list of models"),  # type: ignore[arg-type]
    (lambda: D.size([]), "context: the list is empty"),
    (lambda: D.latency(prefix_len=[1, 2]), "prefix-len [1, 2] is a list. Call once for each value"),
    (lambda: kvcalc.forward("gpt2", kvcalc.Batch.decode(8), stage=1), "stage 1 is not one of 1. Give 0 to 0"),
    (lambda: kvcalc.Batch(3), "3 is no tuple of Sequences. Write Batch.decode(4096)"),  # type: ignore[arg-type]
    (lambda: kvcalc.Precision(3), "dtype 3 is no name of a format"),  # type: ignore[arg-type]
    (lambda: kvcalc.bounds(5, "h100"), "5 is no pass. Give the operators that `forward` returns"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_argument_says_what_is_wrong(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_names_stand_where_objects_do() -> None:
    model, gpu = kvcalc.load_model("gpt2"), kvcalc.load_gpu("h100")
    assert kvcalc.cache_size("gpt2", "4k") == kvcalc.cache_size(model, 4096)
    assert kvcalc.weight_bytes("gpt2") == kvcalc.weight_bytes(model)
    assert kvcalc.mha_ratio("llama-3.1-8b", "8k") == 4
    step = kvcalc.Batch.decode(1024)
    assert kvcalc.forward("gpt2", step) == kvcalc.forward(model, step)
    assert kvcalc.bounds(kvcalc.forward(model, step), "h100") == kvcalc.bounds(kvcalc.forward(model, step), gpu)


@pytest.mark.parametrize(
    "answer",
    [D.size("1k"), D.fit(), D.latency(output_len=8), D.roofline(), D.serve(num_prompts=3, output_len=5), D.compare("mha,mqa")],
    ids=["size", "fit", "latency", "roofline", "serve", "compare"],
)
def test_answers_show_as_html_and_plot(answer: kvcalc.Answer) -> None:
    html = answer._repr_html_()
    assert html.count("<table>") == html.count("</table>") >= 1 and "gpt2" in html
    figure = answer.plot("dark")
    assert type(figure).__name__ == "Figure" and figure.axes


class Pandas:
    """The part of pandas that makes a table from records."""

    DataFrame = staticmethod(lambda records: ("frame", records))


def test_lists_make_a_record_each() -> None:
    """12 layers of 768, K and V in 2 bytes: 36,864 bytes per token. Contexts change fastest, as in the command."""
    answer = D.size(["1k", 2048], batch_size="1,3")
    assert [r["kv_cache_bytes"] for r in answer.records()] == [n * 36_864 for n in (1024, 2048, 3072, 6144)]
    assert answer.stored == 1024 * 36_864 and answer.plot().axes
    compared = D.compare("mha,mqa", context=np.array([1024, 2048]))
    assert [(r["variant"], r["context"]) for r in compared.records()] == [
        (name, context) for name in ("mha", "mqa") for context in (1024, 2048)
    ]


def test_numbers_of_numpy_are_numbers() -> None:
    one, two = np.int64(1), np.int32(2)
    assert deployed(tp=two, nodes=one) == deployed(tp=2, nodes=1)
    assert D.size(np.int64(1024), two, block_size=np.int16(16)).records() == D.size(1024, 2).records()
    assert (
        D.fit(users=two, gpu_memory_utilization=np.float32(0.5)).records() == D.fit(users=2, gpu_memory_utilization=0.5).records()
    )
    wanted = {"input_len": np.int64(64), "output_len": two, "price_per_hour": np.float64(2.5)}
    assert D.latency(**wanted).records() == D.latency(input_len=64, output_len=2, price_per_hour=2.5).records()
    assert D.serve(num_prompts=np.int64(3), rate=np.float64(5)).records() == D.serve(num_prompts=3, rate=5).records()
    assert kvcalc.cache_size("gpt2", np.int64(1024)) == kvcalc.cache_size("gpt2", 1024)


def test_a_frame_is_made_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = D.size([1024, 2048])
    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    assert answer.to_pandas() == ("frame", answer.records())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pandas is not installed\. Run `pip install pandas`"):
        answer.to_pandas()


def test_a_heading_leads_to_its_key() -> None:
    with pytest.raises(AttributeError, match=r"no figure 'users'\. The column 'users' is max_num_seqs"):
        _ = D.fit().users
    with pytest.raises(AttributeError, match="Did you mean cache_size"):
        _ = kvcalc.cachesize  # type: ignore[attr-defined]
    assert not hasattr(kvcalc, "__path_of_no_one__") and not hasattr(D.size(), "_repr_png_")
