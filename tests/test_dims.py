"""The letters in which formulas are shown stand for the sizes that the weights have."""

import pytest

from kvcalc import Model, load_model
from kvcalc.layers.weights import WeightKind
from kvcalc.library.presets import preset_files

MODELS = sorted(preset_files("models"))


def value(formula: str, letters: dict[str, int]) -> int:
    """A formula such as `H·(dn + dv)` with its letters put in."""
    return int(eval(formula.replace("·", "*").replace("/", "//"), {"__builtins__": {}}, letters))


def sizes(model: Model) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """(weight, its sizes, what its letters give) of every matrix that has letters."""
    found = []
    for kind, layer in model.kinds.items():
        for part in (*layer.parts, *layer.shared):
            letters, dims = part.letters() | {"D": model.hidden_size}, part.dims()
            for weight in part.weights(model.hidden_size):
                if weight.kind is WeightKind.MATRIX and weight.name in dims:
                    inputs, outputs = dims[weight.name]
                    given = (value(inputs, letters), value(outputs, letters))
                    found.append((f"{kind}.{weight.name}", (weight.inputs, weight.outputs), given))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_letters_give_the_sizes_of_every_matrix(name: str) -> None:
    for weight, held, given in sizes(load_model(name)):
        assert held == given, weight


def test_the_usual_matrices_have_letters() -> None:
    for name, expected in (("llama-3.1-8b", 7), ("deepseek-v3", 8 + 12), ("qwen3-30b-a3b", 8)):
        assert len(sizes(load_model(name))) == expected
