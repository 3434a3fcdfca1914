"""Wrong arguments of the Python API: each a UserError that says what is wrong, no traceback from within; and what answers do."""

from collections.abc import Callable
from typing import Any

import pytest

import kvcalc
from kvcalc import UserError, deploy

D = deploy("gpt2", "h100")


def deployed(**options: Any) -> Any:
    return deploy("gpt2", "h100", **options)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: D.size("abc"), "context 'abc' is not a whole number"),
    (lambda: D.size(4096.5), "context '4096.5'"),  # type: ignore[arg-type]
    (lambda: D.size(batch_size=0), "batch size '0'"),
    (lambda: D.fit(max_num_seqs="x"), "max-num-seqs 'x'"),
    (lambda: D.fit(foo=1), "unknown option 'foo'"),
    (lambda: D.fit(lengths=5), "5 is no file or distribution"),  # type: ignore[arg-type]
    (lambda: D.fit(engine="vlm"), "unknown engine 'vlm'. Did you mean vllm"),
    (lambda: D.latency(inputlen=3), "Did you mean input_len"),
    (lambda: D.latency(draft=3), "draft 3: Expected `str`"),
    (lambda: D.roofline("decod"), "unknown phase 'decod'"),
    (lambda: D.roofline(batch=5), "5 is no mixed batch"),  # type: ignore[arg-type]
    (lambda: D.serve(cache=3), "3 is no cache"),  # type: ignore[arg-type]
    (lambda: D.serve(rate="x"), "rate 'x'"),
    (lambda: D.compare(5), "5 is no list"),  # type: ignore[arg-type]
    (lambda: D.compare([3]), "3 is no variant"),  # type: ignore[list-item]
    (lambda: deployed(tp="4"), "tp '4' is not a number of GPUs"),
    (lambda: deployed(dtype=5), "dtype 5: Expected `str`"),
    (lambda: deployed(mla_form="x"), "unknown MLA form 'x'"),
    (lambda: deployed(stack=3), "3 is no stack"),
    (lambda: deployed(calibration_from=3), "3 is no GPU to calibrate from"),
    (lambda: deployed(memory=3), "3 is no size of memory"),
    (lambda: deployed(nodes="2"), "'2' is no number of nodes"),
    (lambda: deployed(tp=16, nodes=1), "more than the 8 that its link joins"),
    (lambda: deployed(inter_node_bandwidth="x"), "inter-node-bandwidth 'x'"),
    (lambda: deploy(3, "h100"), "int is no model"),  # type: ignore[arg-type]
    (lambda: deploy("gpt2", None), "NoneType is no GPU"),  # type: ignore[arg-type]
    (lambda: deploy("gpt22", "h100"), "unknown model 'gpt22'. Did you mean gpt2"),
    (lambda: D.size(4096).plot("x"), "unknown style 'x'"),
    (lambda: kvcalc.cache_size(3, 4096), "int is no model"),  # type: ignore[arg-type]
    (lambda: kvcalc.cache_size("gpt2", "4x"), "context '4x'"),
    (lambda: kvcalc.cache_size("gpt2", 4096, precision="fp8"), "'fp8' is no Precision"),  # type: ignore[arg-type]
    (lambda: kvcalc.forward("gpt2", 3), "3 is no Batch"),  # type: ignore[arg-type]
    (lambda: kvcalc.Batch.decode("x"), "context 'x' is neither"),  # type: ignore[arg-type]
    (lambda: kvcalc.Batch.decode(0), "context 0 is outside 1"),
    (lambda: kvcalc.roofline([], 3), "int is no GPU"),  # type: ignore[arg-type]
    (lambda: kvcalc.roofline([3], "h100"), "3 is no Operator"),  # type: ignore[list-item]
    (lambda: kvcalc.fit("gpt2"), "'gpt2' is no Deployment"),  # type: ignore[arg-type]
    (lambda: kvcalc.fit(D, 3), "3 is no FitOptions"),  # type: ignore[arg-type]
    (lambda: kvcalc.load_model(3), "3 is no name of a model"),  # type: ignore[arg-type]
    (lambda: kvcalc.load_gpu(None), "None is no name of a GPU"),  # type: ignore[arg-type]
    (lambda: kvcalc.Parallelism(per_node=-1), "per_node -1"),
    (lambda: kvcalc.plan("gpt2", users="x", context="4k"), "number of users 'x'"),
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
    assert kvcalc.roofline(kvcalc.forward(model, step), "h100") == kvcalc.roofline(kvcalc.forward(model, step), gpu)


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
