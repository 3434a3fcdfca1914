"""Charts drawn with matplotlib, for slides and papers. The same chart gives the same bytes for one matplotlib version.

Text stays text in SVG and is never parsed as mathematics. Colours are Okabe and Ito's, told apart by the colour-blind;
line styles and markers tell them apart in grey.
"""

import io
import itertools
import os
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcalc.errors import UserError, printable
from kvcalc.library.files import destination, write_text
from kvcalc.report.chart import Axis, Chart, Series
from kvcalc.units import shown_in

SUFFIXES = (".png", ".svg", ".pdf")
STYLES: dict[str, dict[str, Any]] = {
    "light": {"size": (8.0, 4.8), "font": 10, "ink": "#1a1a1a", "paper": "white", "dpi": 160},
    "dark": {"size": (8.0, 4.8), "font": 10, "ink": "#e8e8e8", "paper": "#15181d", "dpi": 160},
    "slides": {"size": (13.33, 7.5), "font": 18, "ink": "#1a1a1a", "paper": "white", "dpi": 120},
}
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A000")
LINES, MARKERS, HATCHES = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v", "P", "X", "*"), ("", "//", "..", "xx", "\\\\", "++")


def save(chart: Chart, target: str, style: str = "light") -> None:
    """Write `chart` to a .png, .svg or .pdf file, whole or not at all, or sketch it in the terminal (`-`).

    Raises UserError on another suffix, an unknown style or a place that cannot be written.
    """
    if style not in STYLES:
        raise UserError(f"unknown style {style!r}", hint=f"Known: {', '.join(STYLES)}")
    if target == "-":
        from kvcalc.report.terminal import sketch

        print(sketch(chart))
        return
    suffix = Path(target).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"picture {target!r} should end in one of {', '.join(SUFFIXES)}, or be - for the terminal")
    destination(target)
    write_text(target, render(chart, suffix[1:], style))
    print(f"wrote {printable(target)}", file=sys.stderr)


def render(chart: Chart, suffix: str, style: str = "light") -> bytes:
    """The picture as bytes: `suffix` is png, svg or pdf."""
    mpl = _matplotlib()
    look = STYLES[style]
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "kvcalc",
        "text.parse_math": False,
        "axes.formatter.use_mathtext": False,
        "font.family": "DejaVu Sans",
        "font.size": look["font"],
        "text.color": look["ink"],
        "axes.labelcolor": look["ink"],
        "axes.edgecolor": look["ink"],
        "xtick.color": look["ink"],
        "ytick.color": look["ink"],
        "axes.facecolor": look["paper"],
        "figure.facecolor": look["paper"],
        "savefig.facecolor": look["paper"],
    }
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}[suffix]
    out = io.BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        figure = _figure(chart, look)
        figure.savefig(out, format=suffix, dpi=look["dpi"], metadata=metadata)
    return out.getvalue()


def _matplotlib() -> Any:
    """matplotlib without its remarks on stderr. Raises UserError where the user's matplotlibrc keeps it from starting."""
    import logging

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    backend = os.environ.pop("MPLBACKEND", "")
    try:
        import matplotlib as mpl
    except (ValueError, OSError) as error:
        raise UserError(f"matplotlib cannot be imported: {error}") from None
    if backend:  # an unknown one keeps matplotlib from starting, and we need none
        os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):
            mpl.rcParams["backend"] = backend
    return mpl


def _figure(chart: Chart, look: dict[str, Any]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = [chart, chart.beside] if chart.beside else [chart]
    width, height = look["size"]
    figure = Figure(figsize=(min(width * len(charts), 13.33), height), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, one in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        _panel(figure, axes, one, look, figure.get_size_inches()[0] / len(charts))
    return figure


def _panel(figure: Any, axes: Any, chart: Chart, look: dict[str, Any], width: float) -> None:
    """One chart on its axes, `width` inches wide."""
    lines = textwrap.wrap(chart.subtitle, int(width * 150 / look["font"]))[:2]
    axes.set_title(
        chart.title, loc="left", fontweight="bold", fontsize=look["font"] * 1.2, pad=look["font"] * (1.2 + 1.1 * len(lines))
    )
    subtitle = axes.text(0, 1.015, "\n".join(lines), transform=axes.transAxes, fontsize=look["font"] * 0.8, va="bottom")
    subtitle.set_in_layout(False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color=look["ink"], alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    if chart.categories:
        _bars(axes, chart, look)
    else:
        _scales(axes, chart)
        texts = [t for number, s in enumerate(chart.series) for t in _draw(axes, s, number, look)]
        figure.draw_without_rendering()
        _place(figure, axes, texts)
    _legend(axes, look)


def _scales(axes: Any, chart: Chart) -> None:
    for axis, spec, name in ((axes.xaxis, chart.x, "x"), (axes.yaxis, chart.y, "y")):
        getattr(axes, f"set_{name}label")(spec.title)
        values = [v for s in chart.series for v in (s.xs if name == "x" else s.ys) if v > 0 or not spec.log]
        if spec.log:
            _log_axis(axes, axis, spec, name, values)
        else:
            axis.set_major_formatter(lambda v, _, spec=spec: spec.tick(v))


def _log_axis(axes: Any, axis: Any, spec: Axis, name: str, values: list[float]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    binary = spec.tick.__name__ == "tokens_tick" or (spec.tick.__name__ == "bytes_tick" and shown_in() == "gib")
    decades = max(values) / min(values)
    step = 2 if decades < 2**12 else 8 if decades < 2**24 else 32
    base = step if binary else 10
    getattr(axes, f"set_{name}scale")("log", base=base)
    axis.set_major_locator(LogLocator(base=base, numticks=14))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda v, _: spec.tick(v))
    getattr(axes, f"set_{name}lim")(min(values) / 1.4, max(values) * 1.7)


def _draw(axes: Any, series: Series, number: int, look: dict[str, Any]) -> list[Any]:
    at = number if series.colour < 0 else series.colour
    colour = PALETTE[at % len(PALETTE)]
    if series.kind == "limit":
        axes.axhline(series.ys[0], color=look["ink"], linestyle=(0, (1, 1)), linewidth=1.4, label=series.label)
        return []
    if series.kind == "points":
        areas = [30 + 900 * s for s in series.sizes] if series.sizes else 50
        marker = MARKERS[at % len(MARKERS)]
        axes.scatter(series.xs, series.ys, s=areas, color=colour, alpha=0.85, marker=marker, label=series.label, zorder=3,
                     edgecolors=look["paper"])  # fmt: skip
        texts = zip(series.xs, series.ys, series.labels, strict=False)
        return [axes.annotate(t, (x, y), fontsize=look["font"] * 0.85, zorder=4) for x, y, t in texts if t]
    if series.kind == "trail":
        axes.plot(series.xs, series.ys, color=colour, linewidth=look["font"] / 4, alpha=0.3, zorder=2)
        return []
    dashes = "--" if series.kind == "dashed" else LINES[at % len(LINES)]
    axes.plot(series.xs, series.ys, dashes, color=colour, linewidth=look["font"] / 5, label=series.label)
    return []


def _place(figure: Any, axes: Any, texts: list[Any]) -> None:
    """Put each label where it covers no other: the first free place around its point, then further away."""
    renderer = figure.canvas.get_renderer()
    taken: list[Any] = [*_line_boxes(axes), *_point_boxes(figure, axes)]
    for text in texts:
        gap = text.get_fontsize()
        spots = [(dx * gap * k, dy * gap * k) for k in (0.8, 1.6, 2.6, 3.8, 6) for dx in (1, -1, 0) for dy in (0, -1.2, 1.2)]
        for dx, dy in spots:
            text.set_position((dx, dy))
            text.set_anncoords("offset points")
            text.set_ha("left" if dx > 0 else "right" if dx < 0 else "center")
            box = text.get_window_extent(renderer).padded(1)
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            text.set_visible(False)


def _point_boxes(figure: Any, axes: Any) -> list[Any]:
    """A box around every point, as large as its marker."""
    from matplotlib.transforms import Bbox

    found = []
    for points in axes.collections:
        places, sizes = points.get_offset_transform().transform(points.get_offsets()).tolist(), points.get_sizes().tolist()
        for (x, y), size in zip(places, sizes if len(sizes) == len(places) else sizes[:1] * len(places), strict=True):
            half = size**0.5 / 2 * figure.dpi / 72
            found.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
    return found


def _line_boxes(axes: Any) -> list[Any]:
    """Small boxes along every drawn line, which labels keep off."""
    import numpy as np
    from matplotlib.transforms import Bbox

    found = []
    for line in axes.get_lines():
        points = line.get_transform().transform(np.column_stack(line.get_data()).astype(float))
        for (x0, y0), (x1, y1) in itertools.pairwise(points.tolist()):
            steps = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / 6))
            for i in range(steps + 1):
                x, y = x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps
                found.append(Bbox.from_extents(x - 2, y - 2, x + 2, y + 2))
    return found


def _bars(axes: Any, chart: Chart, look: dict[str, Any]) -> None:
    base = [0.0] * len(chart.categories)
    for number, series in enumerate(s for s in chart.series if s.kind == "bar"):
        colour = PALETTE[number % len(PALETTE)]
        axes.barh(range(len(base)), series.ys, left=base, color=colour, label=series.label, hatch=HATCHES[number % len(HATCHES)],
                  edgecolor=look["paper"])  # fmt: skip
        base = [b + y for b, y in zip(base, series.ys, strict=True)]
    for series in chart.series:
        if series.kind == "limit":
            axes.axvline(series.ys[0], color=look["ink"], linestyle=(0, (1, 1)), linewidth=1.6, label=series.label)
    axes.set_yticks(range(len(base)), chart.categories)
    axes.invert_yaxis()
    axes.set_xlabel(chart.y.title)
    axes.xaxis.set_major_formatter(lambda v, _: chart.y.tick(v))
    most = max([*base, *(s.ys[0] for s in chart.series if s.kind == "limit")])
    axes.set_xticks([n * _step(most) for n in range(int(most / _step(most)) + 2)])
    axes.grid(False, axis="y")


def _step(most: float) -> int:
    """A round step that gives three to ten ticks up to `most` bytes: binary, or decimal where bytes are."""
    binary = [1 << n for n in range(61)]
    steps = binary if shown_in() == "gib" else [size * 10**n for n in range(19) for size in (1, 2, 5)]
    return next(step for step in steps if most / step <= 8)


def _legend(axes: Any, look: dict[str, Any]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    legend = axes.legend(handles, labels, fontsize=look["font"] * 0.85, loc="best", facecolor=look["paper"], edgecolor="none")
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([look["font"] * 4])
