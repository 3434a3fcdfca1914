"""The report page needs no other file, and escapes names from files."""

import html
import re
from pathlib import Path

import pytest
from conftest import Run

from kvcalc.report.charts.series_styles import STYLES


def written(kvcalc: Run, line: str, folder: Path) -> str:
    target = folder / "page.html"
    found = kvcalc(f"report {line} -o {target}")
    assert (found.code, found.out) == (0, "") and found.err.endswith(f"wrote {target}\n"), found.err
    return target.read_text(encoding="utf-8")


def test_pictures_have_the_colours_of_the_page(kvcalc: Run, tmp_path: Path) -> None:
    """Text, background and the first colour of the palette follow the page's variables, which it sets for both schemes."""
    page = written(kvcalc, "gpt-oss-20b --gpu h100 --context 4k", tmp_path)
    style, pictures = re.findall(r"<style>.*?</style>", page, re.DOTALL)[0], re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert pictures
    for name in ("ink", "paper", "blue"):
        light, dark = (getattr(STYLES[scheme], name).lower() for scheme in ("light", "dark"))
        assert f"--{name}: {dark}" in style and not any(light in svg for svg in pictures)
        assert any(f": var(--{name})" in svg for svg in pictures)


def test_the_page_needs_nothing_else_and_escapes_names_from_files(kvcalc: Run, tmp_path: Path) -> None:
    source = Path(__file__).parent.parent.parent / "presets" / "models" / "llama-3.2-1b.yaml"
    mine = tmp_path / "mine.yaml"
    text = re.sub(r"^name: .*$", "name: '<b>&</b></script>'", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    mine.write_text(text, encoding="utf-8")
    page = written(kvcalc, f"{mine} --gpu h100", tmp_path)
    assert "<b>" not in page and page.count("</script>") == 1
    assert not re.search(r'(?:src|href)="(?!#|data:)', page) and "url(http" not in page and "@import" not in page
    names = re.findall(r' id="([^"]*)"', page)
    assert len(names) == len({*names})
    assert {*re.findall(r"url\(#([^)]*)\)", page), *re.findall(r'href="#([^"]*)"', page)} <= {*names}
    assert "<!-- " not in page
    for command in re.findall(r"<code>(.*?)</code>", page):
        assert kvcalc(html.unescape(re.sub("</?span>", "", command)).removeprefix("kvcalc ")).code == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("report llama-3.1-8b --gpu h100,h200 -o x.html", "one deployment"),
        ("report llama-3.1-8b --context 1k,2k -o x.html", "is not a whole number"),
        ("report llama-3.1-8b --engine vlm -o x.html", "vllm"),
        ("report llama-3.1-8b -o /", "is a folder"),
    ],
)
def test_what_cannot_be_a_page_is_one_line_and_no_file(
    kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = kvcalc(line)
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1) and said in found.err
    assert not [*tmp_path.iterdir()]
