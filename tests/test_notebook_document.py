"""The notebook in docs/ runs, and its stored output equals the current output."""

import base64
from typing import Any

from notebook_cells import executed, read


def test_every_cell_gives_what_the_notebook_shows() -> None:
    shown, now = read(), executed(read())
    cells = [(a, b) for a, b in zip(shown["cells"], now["cells"], strict=True) if a["cell_type"] == "code"]
    assert len(cells) >= 6 and all(cell["outputs"] for cell, _ in cells[1:])
    for kept, found in cells:
        assert [drawn(one) for one in kept["outputs"]] == [drawn(one) for one in found["outputs"]]
        assert kept["outputs"] == found["outputs"], "".join(kept["source"])
        assert kept["execution_count"] == found["execution_count"]


def drawn(output: dict[str, Any]) -> bytes:
    """Replace the picture in an output by its header, which contains its size. The rest depends on matplotlib's version."""
    return base64.b64decode(output.get("data", {}).pop("image/png", ""))[:24]


def test_it_is_a_notebook_that_jupyter_opens() -> None:
    found = read()
    assert (found["nbformat"], found["metadata"]["kernelspec"]["name"]) == (4, "python3")
    for cell in found["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= set(cell)
        assert cell["cell_type"] == "markdown" or {"execution_count", "outputs"} <= set(cell)
