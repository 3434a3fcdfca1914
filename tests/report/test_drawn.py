"""What stands on a picture and how: titles and keys within the page, marks of which one may cover another."""

from kvcalc.report.charts.chart import Axis, Chart, Series, bar_chart, joined
from kvcalc.report.charts.drawing import figure
from kvcalc.report.charts.series_styles import STYLES

LIGHT = STYLES["light"]  # a font of 10 points
X, Y = Axis("x"), Axis("y")


def test_what_charts_have_in_common_stands_in_lines_as_long_as_the_page() -> None:
    """13.33 inches of 9 letters a line: 119, which fifteen words of seven letters and their spaces fill."""
    bars = bar_chart("bars", "", ("a", "b"), (1.0, 2.0), str)
    drawn = figure(joined([bars._replace(over=(" ".join(["letters"] * 30), "")), bars]), LIGHT)
    drawn.draw_without_rendering()
    line = " ".join(["letters"] * 15)
    assert drawn.get_suptitle().rstrip("\n") == f"{line}\n{line}"
    assert all(text.get_window_extent().x1 <= drawn.bbox.x1 for text in drawn.texts)


def test_a_key_of_many_long_names_stands_in_rows_within_the_page() -> None:
    """13.33 inches of 13 letters: 173, three times 40 and 6 for the mark; twelve names in four rows."""
    points = tuple(Series(f"{n:>2} {'x' * 37}", (n + 1.0,), (n + 1.0,), "points") for n in range(12))
    drawn = figure(Chart("t", "", X, Y, points), LIGHT)
    drawn.draw_without_rendering()
    (key,) = drawn.legends
    boxes = [text.get_window_extent() for text in key.get_texts()]
    assert (len(boxes), len({round(box.x0) for box in boxes}), len({round(box.y0) for box in boxes})) == (12, 3, 4)


def test_names_of_points_take_no_room_from_the_axes() -> None:
    places = []
    for labels in ((), ("a name much longer than the axes are far from the page's edge",) * 2):
        drawn = figure(Chart("t", "", X, Y, (Series("", (1.0, 2.0), (1.0, 2.0), "points", labels=labels),)), LIGHT)
        drawn.draw_without_rendering()
        places.append(drawn.axes[0].get_window_extent().bounds)
    assert places[0] == places[1]
