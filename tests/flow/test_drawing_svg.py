"""Flows are drawn as SVG and as PNG, and charts draw the right parts at the right places."""

from __future__ import annotations

import io
import itertools
import re
import sys
from dataclasses import dataclass
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFont

from streamiter import Flow
from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.captions import FONT_FILE, advances, fit
from streamiter.flow.drawing.charts import Line, Panel, chart
from streamiter.flow.drawing.formats import png, svg
from streamiter.flow.drawing.picture import Box, Link, Node, Picture

SVG = "{http://www.w3.org/2000/svg}"
Point = tuple[float, float]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# The widths of texts are measured by another program than the one that makes the drawing.
_FONT = ImageFont.truetype(str(FONT_FILE), 1000)


@dataclass(frozen=True)
class Rectangle:
    left: float
    top: float
    right: float
    bottom: float

    def contains(self, other: Rectangle, slack: float = 0.02) -> bool:
        return (
            self.left - slack <= other.left
            and self.top - slack <= other.top
            and other.right <= self.right + slack
            and other.bottom <= self.bottom + slack
        )

    def overlaps(self, other: Rectangle, slack: float = 0.02) -> bool:
        return (
            self.left + slack < other.right
            and other.left + slack < self.right
            and self.top + slack < other.bottom
            and other.top + slack < self.bottom
        )

    def has_inside(self, point: Point, slack: float = 0.02) -> bool:
        x, y = point
        return self.left + slack < x < self.right - slack and self.top + slack < y < self.bottom - slack


@dataclass(frozen=True)
class Shown:
    """The parts of a drawing; its nodes and links are in the order of the picture."""

    canvas: Rectangle
    nodes: list[Rectangle]
    node_texts: list[list[tuple[str, Rectangle]]]
    boxes: list[Rectangle]
    headings: list[tuple[str, Rectangle]]
    links: list[list[Point]]
    """Points along each link, close to each other."""
    labels: list[tuple[str, Rectangle]]
    titles: list[str]
    """The texts of the tooltips."""


def read(svg: str) -> Shown:
    root = ElementTree.fromstring(svg)
    texts = list(root.iter(f"{SVG}text"))
    groups = [group for group in root.iter(f"{SVG}g") if _is(group, "node")]
    return Shown(
        canvas=Rectangle(0, 0, float(root.attrib["width"]), float(root.attrib["height"])),
        nodes=[_bounds(part) for group in groups for part in group if _is(part, "body")],
        node_texts=[[_text(text) for text in group.iter(f"{SVG}text")] for group in groups],
        boxes=[_bounds(part) for part in root if _is(part, "loop")],
        headings=[_text(text) for text in texts if _is(text, "heading")],
        links=[_points(part.attrib["d"]) for part in root if _is(part, "link")],
        labels=[_text(text) for text in texts if _is(text, "label")],
        titles=[title.text or "" for title in root.iter(f"{SVG}title")],
    )


def _is(part: ElementTree.Element, name: str) -> bool:
    return name in part.attrib.get("class", "").split()


def _numbers(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text)]


def _bounds(part: ElementTree.Element) -> Rectangle:
    if part.tag == f"{SVG}rect":
        x, y, width, height = (float(part.attrib[name]) for name in ("x", "y", "width", "height"))
        return Rectangle(x, y, x + width, y + height)
    # Ends of lines, and of arcs that begin and end at both sides: A rx,ry 0 0 1 x,y
    path = re.sub(r"A(\S+),(\S+) 0 0 1 ", "L", part.attrib["d"])
    corners = [_numbers(rest) for command, rest in re.findall(r"([ML])([^A-Z]*)", path)]
    xs = [x for numbers in corners for x in numbers[::2]] + [float(x) for x in re.findall(r"H(\S+)", path)]
    ys = [y for numbers in corners for y in numbers[1::2]] + [float(y) for y in re.findall(r"V(\S+)", path)]
    arc = max((float(ry) for ry in re.findall(r"A\S+,(\S+) 0 0 1 ", part.attrib["d"])), default=0.0)
    return Rectangle(min(xs), min(ys) - arc, max(xs), max(ys) + arc)


def _points(way: str) -> list[Point]:
    points: list[Point] = []
    for command, rest in re.findall(r"([MLCQ])([^MLCQ]*)", way):
        numbers = _numbers(rest)
        ends = list(zip(numbers[::2], numbers[1::2], strict=True))
        points += ends if command == "M" else [_bezier([points[-1], *ends], k / 20) for k in range(1, 21)]
    return points


def _bezier(points: list[Point], share: float) -> Point:
    while len(points) > 1:
        points = [
            ((1 - share) * a + share * c, (1 - share) * b + share * d) for (a, b), (c, d) in itertools.pairwise(points)
        ]
    return points[0]


def _text(text: ElementTree.Element) -> tuple[str, Rectangle]:
    written = "".join(
        [text.text or "", *((part.text or "") for part in text if part.tag == f"{SVG}tspan")]
        + [part.tail or "" for part in text if part.tag == f"{SVG}title"]
    )
    x, y, size = (float(text.attrib[name]) for name in ("x", "y", "font-size"))
    width = float(_FONT.getlength(written)) * size / 1000
    left = x - width / 2 if text.attrib["text-anchor"] == "middle" else x
    # Except accents, this font's characters reach at most 0.8 of its size above the line, and 0.24 below it.
    return written, Rectangle(left, y - 0.8 * size, left + width, y + 0.24 * size)


# Letters of the font that measures drawings; the widths of other characters are estimated.
LETTERS = "abcdefghijklmnopqrstuvwxyzWMÄß_.- /→×<>&\"'"
SHAPES = ("operator", "source", "sink", "iteration")


def check(picture: Picture) -> Shown:
    """Check everything that must be true of any drawing, and return its parts."""
    shown = read(svg(picture))
    assert len(shown.nodes) == len(picture.nodes)
    assert len(shown.boxes) == len(picture.boxes)
    _check_places(picture, shown)
    _check_texts(picture, shown)
    _check_links(picture, shown)
    return shown


def _check_places(picture: Picture, shown: Shown) -> None:
    for one, other in [*combinations(shown.nodes, 2), *combinations(shown.boxes, 2)]:
        assert not one.overlaps(other)
    for node, place in zip(picture.nodes, shown.nodes, strict=True):
        assert shown.canvas.contains(place)
        for number, box in enumerate(shown.boxes):
            assert box.contains(place) if node.box == number else not box.overlaps(place)


def _check_texts(picture: Picture, shown: Shown) -> None:
    for texts, place in zip(shown.node_texts, shown.nodes, strict=True):
        assert all(place.contains(text) for _, text in texts)
        assert not any(one.overlaps(other) for (_, one), (_, other) in combinations(texts, 2))
    for (_, text), box in zip(shown.headings, shown.boxes, strict=True):
        assert box.contains(text)
        assert not any(text.overlaps(place) for place in shown.nodes)
    assert len(shown.labels) == sum(bool(link.label.strip()) for link in picture.links)
    labels = [text for _, text in shown.labels]
    labelled = [link for link in picture.links if link.label.strip()]
    for link, text in zip(labelled, labels, strict=True):
        if link.closes_loop and (box := picture.nodes[link.source].box) is not None:
            assert shown.boxes[box].contains(text)
    for text in labels:
        assert shown.canvas.contains(text)
        assert not any(text.overlaps(place) for place in shown.nodes)
    assert not any(one.overlaps(other) for one, other in combinations(labels, 2))


def _check_links(picture: Picture, shown: Shown) -> None:
    for link, points in zip(picture.links, shown.links, strict=True):
        source, target = shown.nodes[link.source], shown.nodes[link.target]
        assert _is_on_side(source, points[0], source.right)
        assert _is_on_side(target, points[-1], target.left)
        assert not any(place.has_inside(point) for place in shown.nodes for point in points)
        if link.closes_loop:
            own = shown.boxes[picture.nodes[link.source].box or 0] if shown.boxes else shown.canvas
            assert all(own.has_inside(point) for point in points)


def _is_on_side(place: Rectangle, point: tuple[float, float], side: float) -> bool:
    """Return whether the point is at the straight part of the border, away from corners, which may be cut or round."""
    x, y = point
    return abs(x - side) < 0.02 and place.top + 8 < y < place.bottom - 8


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    """Return graphs without cycles except feedback, with up to two iterations, and services of some steps."""
    count = draw(st.integers(1, 14))
    texts = st.text(LETTERS, min_size=1, max_size=70).filter(lambda text: bool(text.strip()))
    borders = sorted(draw(st.sets(st.integers(0, count), max_size=4)))
    ranges = [range(first, last) for first, last in zip(borders[::2], borders[1::2], strict=False)]
    box_of = {node: box for box, members in enumerate(ranges) for node in members}
    nodes = [
        Node(
            draw(texts),
            draw(st.sampled_from(SHAPES)),
            draw(st.sampled_from([1, 2, 128])),
            tuple(draw(st.lists(texts, max_size=2))),
            box_of.get(number),
        )
        for number in range(count)
    ]
    links = []
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    for one, other in draw(st.lists(pairs, max_size=20)):
        label = draw(st.just("") | texts)
        if one < other:
            links.append(Link(one, other, label=label))
        elif one in box_of and box_of[one] == box_of.get(other):
            links.append(Link(one, other, draw(st.sampled_from(["feedback", "criteria"])), label))
    for number in range(count, count + draw(st.integers(0, 3))):
        nodes.append(Node(draw(texts), "service", notes=tuple(draw(st.lists(texts, max_size=4)))))
        users = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=5))
        links += [Link(user, number, "service", draw(st.just("") | texts)) for user in users]
    boxes = tuple(Box(draw(texts), tuple(draw(st.lists(texts, max_size=2)))) for _ in ranges)
    return Picture(draw(texts), tuple(nodes), tuple(links), boxes)


@given(pictures())
def test_no_parts_of_any_drawing_overlap(picture: Picture) -> None:
    """A node covered another node, or a link crossed one, so the drawing showed another flow."""
    check(picture)


def test_nodes_are_right_of_their_inputs() -> None:
    """A node was drawn left of its input, although people read from left to right."""
    nodes = tuple(Node(str(number), "operator") for number in range(4))
    [a, b, c, d] = check(Picture("flow", nodes, (Link(0, 1), Link(1, 2), Link(0, 2), Link(3, 2)))).nodes
    assert a.right < b.left
    assert b.right < c.left
    assert b.left - 40 < d.left < c.left  # d is near its target, and not at the far left
    assert d.right < c.left


def test_a_straight_flow_is_drawn_in_a_straight_line() -> None:
    """The links of a straight flow had bends, which readers took for a meaning."""
    nodes = (Node("clicks", "source"), Node("count", "operator", 2, ("3 in",)), Node("counts", "sink"))
    shown = check(Picture("flow", nodes, (Link(0, 1, label="by key"), Link(1, 2))))
    assert len({round(y, 1) for points in shown.links for _, y in points}) == 1


def test_a_link_does_not_cross_others_needlessly() -> None:
    """The links of two pairs crossed, although the nodes can be placed without a crossing."""
    nodes = tuple(Node(name, "operator") for name in "abcd")
    shown = check(Picture("flow", nodes, (Link(0, 3), Link(1, 2))))
    assert all(len({round(y, 1) for _, y in points}) == 1 for points in shown.links)


def test_the_link_of_a_head_that_feeds_itself_goes_around_it() -> None:
    """The link of a head that feeds itself was drawn through the head."""
    nodes = (Node("start", "source"), Node("variable 0", "iteration", box=0))
    links = (Link(0, 1, label="initial"), Link(1, 1, "feedback", "feedback, epoch + 1, rebalance"))
    shown = check(Picture("flow", nodes, links, (Box("iteration 1"),)))
    assert max(y for _, y in shown.links[1]) > shown.nodes[1].bottom


def test_a_service_bends_no_link_of_data() -> None:
    """A service was drawn between steps, and bent the links of the data."""
    nodes = (
        Node("clicks", "source"),
        Node("train", "operator", 4),
        Node("losses", "sink"),
        Node("parameter server", "service", notes=("2 shards in this process", "w, BSP: minimum clock 7")),
    )
    links = (Link(0, 1), Link(1, 2), Link(1, 3, "service", "get, add"))
    shown = check(Picture("flow", nodes, links))
    [_, train, losses, server] = shown.nodes
    assert max(train.bottom, losses.bottom) < server.top
    to_losses = [y for _, y in shown.links[1]]
    assert max(to_losses) - min(to_losses) < 8


def test_a_link_to_a_service_has_two_arrowheads() -> None:
    """A service had one arrowhead, and was taken for a sink."""
    nodes = (Node("train", "operator"), Node("server", "service"), Node("losses", "sink"))
    drawn = svg(Picture("flow", nodes, (Link(0, 1, "service", "get, add"), Link(0, 2))))
    assert drawn.count('marker-start="url(#streamiter-service)" marker-end="url(#streamiter-service)"') == 1
    assert drawn.count("marker-start=") == 1


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        "a & b ]]> \"quoted\" 'too'",
        "nul \x00, escape \x1b, half a pair \ud800, no character \uffff",
        "two\nlines\tand a tab",
        "日本語の名前",
    ],
)
def test_names_may_have_any_characters(name: str) -> None:
    """A name of a user or a topic had one character that XML cannot have, and broke the drawing."""
    link, box = Link(0, 1, label=name), Box(name)
    shown = read(svg(Picture(name, (Node(name, "source"), Node(name, "operator", box=0)), (link,), (box,))))
    written = "".join(text for text, _ in shown.node_texts[1])
    kept = [character for character in name if character.isprintable() and character not in " \ud800\uffff"]
    assert [character for character in written if character in kept] == kept


def test_a_long_name_continues_on_the_next_line() -> None:
    """A node was as wide as its long name, and pushed all other nodes out of sight."""
    shown = check(Picture("flow", (Node("gradients of mini-batches, one for each worker", "operator", 4),), ()))
    texts = [text for text, _ in shown.node_texts[0]]
    assert len(texts) > 1
    assert " ".join(texts) == "gradients of mini-batches, one for each worker ×4"
    assert shown.titles == []


def test_a_name_that_is_too_long_is_shortened_and_complete_in_the_tooltip() -> None:
    """The end of a name that was too long could not be read anywhere."""
    name = "a-very-long-name " * 12
    shown = check(Picture("flow", (Node(name, "operator"),), (Link(0, 0, "feedback", label=name),)))
    assert shown.node_texts[0][-1][0].endswith("…")
    assert shown.labels[0][0].endswith("…")
    assert shown.titles == [name.strip(), name.strip()]


def test_a_drawing_is_dark_on_a_dark_screen() -> None:
    """A drawing had dark lines on a dark page."""
    drawn = svg(Picture("flow", (Node("a", "operator"),), ()))
    light, _, dark = drawn.partition("@media (prefers-color-scheme: dark)")
    assert ".streamiter .canvas { fill: #ffffff }" in light
    assert ".streamiter .canvas { fill: #0d1117 }" in dark


@given(st.text(max_size=60), st.integers(1, 4), st.integers(3, 16))
def test_fitted_text_is_as_narrow_as_asked_for(text: str, lines: int, characters: int) -> None:
    """A text of unusual characters was wider than its place."""
    fitted = fit(text, 10, characters, lines=lines)
    assert len(fitted.lines) <= lines
    assert all(len(line.text.removesuffix("…")) <= characters for line in fitted.lines)


def test_the_table_of_widths_is_that_of_the_font() -> None:
    """The font was exchanged without its table of widths, and texts were wider than their nodes."""
    font = ImageFont.truetype(str(FONT_FILE), 2048)
    # Pillow does not draw a soft hyphen, which only allows a break.
    shown = advances().keys() - {"\xad"}
    assert {each: 2048 * advances()[each] for each in shown} == {each: font.getlength(each) for each in shown}


PICTURE = Picture(
    "a flow", (Node("clicks", "source"), Node("count ×", "operator", 2, ("epoch 0",))), (Link(0, 1, label="by key"),)
)


def image_of(picture: Picture) -> Image.Image:
    drawn = Image.open(io.BytesIO(png(picture)))
    assert drawn.format == "PNG"
    return drawn.convert("L")


def dark_pixels(image: Image.Image, where: Rectangle) -> int:
    """Return the number of dark pixels in a rectangle; a unit has two pixels in each direction."""
    part = image.crop(tuple(round(2 * side) for side in (where.left, where.top, where.right, where.bottom)))
    return sum(part.histogram()[:128])


def test_the_png_is_the_drawing_at_twice_the_size() -> None:
    """Text was hard to read on screens with small pixels."""
    shown = read(svg(PICTURE))
    assert image_of(PICTURE).size == (
        pytest.approx(2 * shown.canvas.right, abs=2),
        pytest.approx(2 * shown.canvas.bottom, abs=2),
    )


def test_text_is_at_its_places_and_nowhere_else_in_a_node() -> None:
    """A drawing without a font had no text, and no error said so."""
    image, shown = image_of(PICTURE), read(svg(PICTURE))
    texts = [text for texts in shown.node_texts for _, text in texts] + [text for _, text in shown.labels]
    assert len(texts) == 4
    assert all(dark_pixels(image, text) > 40 for text in texts)
    name = shown.node_texts[1][0][1]
    node = shown.nodes[1]
    for around in (
        Rectangle(node.left + 3, name.top, name.left - 1, name.bottom),
        Rectangle(name.right + 1, name.top, node.right - 3, name.bottom),
    ):
        assert dark_pixels(image, around) == 0


def test_the_font_of_the_package_is_used_on_a_machine_without_fonts() -> None:
    """A drawing made in a container had no text, or other pixels than on a machine with fonts."""
    from resvg_py import svg_to_bytes

    text = svg(PICTURE)
    assert set(text) - {"\n"} <= advances().keys()
    alone = svg_to_bytes(svg_string=text, zoom=2, font_files=[str(FONT_FILE)], skip_system_fonts=True)
    without = svg_to_bytes(svg_string=text, zoom=2, skip_system_fonts=True)
    assert png(PICTURE) == bytes(alone)
    assert png(PICTURE) != bytes(without)


def test_names_in_other_scripts_do_not_break_it() -> None:
    """A name in another script, whose characters a machine may have no font for, broke the drawing."""
    assert image_of(Picture("流れ", (Node("日本語 \x00", "operator"),), ())).size[0] > 100


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error did not name the package of the renderer, which users do not know."""
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    flow = Flow("clicks")
    flow.from_items([1]).collect()
    with pytest.raises(ConfigurationError, match=r"pip install 'streamiter\[draw\]'"):
        flow.draw(format="png")
    assert flow.draw(format="svg").startswith("<svg")


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
