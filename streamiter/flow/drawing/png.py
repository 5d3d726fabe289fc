"""The picture as PNG."""

from __future__ import annotations

from collections.abc import Callable

from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.font_file import FONT_FAMILY, FONT_FILE, advances
from streamiter.flow.drawing.picture import Picture
from streamiter.flow.drawing.svg import svg

__all__ = ["png", "png_of_svg"]

# Pixels for each unit of the drawing: text is sharp on screens with small pixels too.
_SCALE = 2


def png(picture: Picture) -> bytes:
    """The light drawing, with the same font on every machine."""
    return png_of_svg(svg(picture, for_screens=False))


def png_of_svg(text: str) -> bytes:
    """Any drawing in SVG. Raises ConfigurationError where the package that renders it is missing."""
    render = _renderer()
    return render(
        svg_string=text,
        zoom=_SCALE,
        font_files=[str(FONT_FILE)],
        font_family=FONT_FAMILY,
        sans_serif_family=FONT_FAMILY,
        # To look through a machine's fonts takes a while; only names in other scripts need them.
        skip_system_fonts=all(character in advances() for character in text if character != "\n"),
    )


def _renderer() -> Callable[..., bytes]:
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise ConfigurationError(
            "drawing PNG: expected the package resvg_py, which is not installed; "
            "install it with: pip install 'streamiter[draw]', or draw SVG"
        ) from error
    return svg_to_bytes
