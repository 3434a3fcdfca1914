"""Batches: phases by name, and mixed batches in text form."""

import pytest

from kvcalc import Batch, Sequences, UserError, forward, load_model


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("500+4x1@4k", ((1, 500, 0), (4, 1, 4095))),
        ("1x4096", ((1, 4096, 0),)),
        ("8x1@8192", ((8, 1, 8191),)),
        ("512@2k + 2×4@100", ((1, 512, 1536), (2, 4, 96))),
        ("1@1", ((1, 1, 0),)),
    ],
)
def test_a_mixed_batch_as_people_write_it(text: str, groups: tuple[tuple[int, int, int], ...]) -> None:
    assert Batch.parse(text).groups == tuple(Sequences(*g) for g in groups)


def test_a_prompt_of_500_and_four_decodes_are_one_matrix_of_504_rows() -> None:
    batch = Batch.parse("500+4x1@4k")
    assert (batch.tokens, batch.sequences) == (504, 5)
    model = load_model("llama-2-7b")
    up = next(o for o in forward(model, batch) if o.name == "gate_up")
    assert up.cost.flops == 2 * 504 * 4096 * 2 * 11_008


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "should read like"),
        ("500+", "should read like"),
        ("500+4y1", "new tokens '4y1' is not a whole number"),
        ("4x1@4k@5", "should read like"),
        ("10@5", "more than its context of 5"),
        ("0x1@5", "sequences '0' is outside"),
        ("1e999", "new tokens '1e999' is not a whole number"),
        ("nan", "new tokens 'nan'"),
    ],
)
def test_what_is_no_batch_is_refused_by_its_term(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Batch.parse(text)


def test_phases() -> None:
    assert Batch.of_phase("decode", 100, 3) == Batch.decode(100, 3)
    assert Batch.of_phase("prefill", 100, 3) == Batch.prefill(100, 3)
    with pytest.raises(UserError, match="unknown phase 'training'"):
        Batch.of_phase("training", 1, 1)
