"""Charts draw the right parts at the right places."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from streamiter.flow.drawing.charts import Line, Panel, chart


def labels(drawing: str) -> list[str]:
    return re.findall(r">([^<]+)</text>", drawing)


def test_the_axis_ends_above_where_lines_are_cut_off() -> None:
    """The first loss was twenty times the other losses, so all other losses were drawn on the axis."""
    losses = Line("loss", [0.0, 1.0, 2.0], [10.0, 0.38, 0.31])
    drawing = chart([Panel("Loss", "epoch", [losses], cut_above=0.4)])
    assert {"0.30", "0.40"} <= set(labels(drawing))
    assert "10" not in labels(drawing)
    [clip] = re.findall(r'<clipPath id="(\w+)">', drawing)
    before, inside = drawing.split(f'<g clip-path="url(#{clip})">')
    assert "<polyline" not in before
    assert "<polyline" in inside.split("</g>")[0]


def test_each_panel_has_its_own_frame() -> None:
    """With one name for both of their frames, the second panel was empty."""
    panel = Panel("Loss", "epoch", [Line("loss", [0.0, 1.0], [2.0, 1.0])], cut_above=1.5)
    clips = re.findall(r'<clipPath id="(\w+)"><path d="M(\d+),', chart([panel, panel]))
    assert [len({name for name, _ in clips}), len({left for _, left in clips})] == [2, 2]


@pytest.mark.parametrize(("points", "marks"), [(20, 40), (200, 0)])
def test_points_are_marked_where_there_is_room(points: int, marks: int) -> None:
    """The marks of two hundred points hid the three lines that joined them."""
    xs = [float(x) for x in range(points)]
    few_and_many = [Line("few", xs[:20], xs[:20]), Line("many", xs, xs)]
    assert chart([Panel("Loss", "epoch", few_and_many)]).count("<circle") == marks


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 7, 12, 13, 26, 1000])
def test_an_axis_of_epochs_has_whole_numbers(epochs: int) -> None:
    """The axis showed an epoch 2.5 in the place of the third epoch."""
    xs = range(1, epochs + 1)
    drawing = chart([Panel("Loss", "epoch", [Line("loss", xs, [10.0] * epochs)], has_whole_xs=True)])
    below = re.findall(r'text-anchor="middle"[^>]*>([^<]+)</text>', drawing)
    numbers = [int(label) for label in below if label != "epoch"]
    assert 2 <= len(numbers) <= 11
    assert numbers[0] <= 1 <= epochs <= numbers[-1]
    assert len({after - before for before, after in pairwise(numbers)}) == 1
