"""The reference pages agree with the code, and every record key has a meaning, a unit and a type."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run
from references import PAGES

from kvcalc import UserError, record_keys
from kvcalc.cli.commands import COMMANDS
from kvcalc.records.figures import UNITS_OF_ENDINGS, UNITS_OF_TYPES, record_schema
from kvcalc.report.export import RECORD_CLASSES, kinds, record_class
from kvcalc.report.text.tables import FORMATS

DOCS = Path(__file__).parent.parent / "docs"
WITHOUT = {"plot", "report", "schema", "mcp"}  # which print no records


@pytest.mark.parametrize(("name", "made"), PAGES.items())
def test_pages_are_what_the_code_makes(name: str, made: Callable[[], str]) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == made(), "run python tests/remake_docs.py --references"


def test_every_command_with_records_is_described() -> None:
    assert {kind.partition(" ")[0] for kind in kinds()} == set(COMMANDS) - WITHOUT


@pytest.mark.parametrize("kind", kinds())
def test_every_key_has_a_unit_and_a_meaning(kind: str) -> None:
    for figure in kinds()[kind].values():
        assert figure.unit in {*UNITS_OF_ENDINGS.values(), *UNITS_OF_TYPES.values(), *FORMATS} and figure.meaning, figure
        assert figure.nullable == ("null" in figure.meaning), figure
        assert "{" in figure.format or figure.format in ("", *FORMATS), figure


@pytest.mark.parametrize("kind", RECORD_CLASSES)
def test_the_schema_of_a_record(kind: str) -> None:
    schema = record_schema(record_class(kind))
    properties = schema["properties"]
    assert isinstance(properties, dict) and list(properties) == list(kinds()[kind])
    for name, figure in kinds()[kind].items():
        is_nullable = "null" in properties[name]["type"]
        assert is_nullable == figure.nullable and properties[name]["unit"] == figure.unit


def test_no_stale_descriptions(kvcalc: Run, tmp_path: Path) -> None:
    """Each described key of the fast commands is in some record."""
    timeline = tmp_path / "t.csv"
    served = f"serve gpt2 --num-prompts 3 --isl 9 --osl 3 --timeline {timeline}"
    lines = {
        "size": "size gpt2",
        "compare": "compare gpt2",
        "roofline": "roofline gpt-oss-20b",
        "roofline (without a model)": "roofline",
        "latency": "latency gpt2 --no-cache --price-per-hour 1",
        "serve": served,
        "models": "models gpt2",
        "gpus": "gpus h100",
        "fit --lengths": "fit gpt2 --lengths lognormal:9,9",
        "fit --matrix": "fit gpt2 --matrix",
        "fit --allocations": f"fit gpt2 --allocations {DOCS / 'examples' / 'allocations.txt'}",
        "plan": "plan gpt2 --users 1 --context 1k --gpu h100",
    }
    for kind, line in lines.items():
        described = {name for name, figure in kinds()[kind].items() if figure.required}
        found = {name for record in kvcalc(f"{line} --format json").records for name in record}
        assert (
            described - found <= {"host_weight_bytes", "host_cache_bytes", "window_cache_bytes", "state_bytes"} | _of_offloading()
        ), kind
    with timeline.open(encoding="utf-8") as file:
        assert next(csv.reader(file)) == list(kinds()["serve --timeline (a file)"])


def _of_offloading() -> set[str]:
    return {"recompute_s", *(name for name in kinds()["fit"] if name.startswith("offload"))}


def test_keys_of_a_command() -> None:
    assert record_keys("fit")["num_blocks"].type == "integer"
    with pytest.raises(UserError, match="no records of 'plott'"):
        record_keys("plott")
