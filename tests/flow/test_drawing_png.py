"""Flows are drawn as PNG."""

from __future__ import annotations

import io
import sys

import pytest
from flow.svg_geometry import Rectangle, read
from PIL import Image

from streamiter import Flow
from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.captions import FONT_FILE, advances
from streamiter.flow.drawing.formats import png, svg
from streamiter.flow.drawing.picture import Link, Node, Picture

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
