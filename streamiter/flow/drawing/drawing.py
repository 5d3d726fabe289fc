"""The drawing of a flow in the format that is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.picture import Node, NodeEdge, Picture, picture_of
from streamiter.flow.drawing.svg import png, svg
from streamiter.runtime.graph import Step
from streamiter.runtime.statistics import JobStatistics

__all__ = [
    "DrawingFormat",
    "draw",
    "mermaid",
]


DrawingFormat = Literal["mermaid", "svg", "png"]


def draw(
    flow: str, steps: Sequence[Step], statistics: JobStatistics | None, drawing_format: DrawingFormat
) -> str | bytes:
    """The steps of a flow as text, or as bytes for PNG."""
    drawers: dict[str, Callable[[Picture], str | bytes]] = {"mermaid": mermaid, "svg": svg, "png": png}
    if drawing_format not in drawers:
        raise ConfigurationError(
            f"flow {flow!r}: draw expected the format {', '.join(map(repr, drawers))}, given {drawing_format!r}; "
            "choose one of these"
        )
    return drawers[drawing_format](picture_of(flow, steps, statistics))


_SHAPES = {
    "source": ("[(", ")]"),
    "sink": ("[/", "/]"),
    "iteration": ("{{", "}}"),
    "operator": ("[", "]"),
    "service": ("[[", "]]"),
}
# Mermaid's own way to write a character that means something to it or to HTML.
_CODES = {ord(character): f"#{ord(character)};" for character in '"#&<>`'} | dict.fromkeys(
    (*range(32), 127), " "
)
_PLAIN_TITLE = re.compile(r"[A-Za-z][\w ()-]*")
_PLAIN_LABEL = re.compile(r"[\w ,+-]*")


def mermaid(picture: Picture) -> str:
    """A node for each step and service, a box for each iteration; what is not on its way forward is dotted.

    The picture as Mermaid text.
    """
    lines = ["---", f"title: {_title(picture.title)}", "---", "flowchart LR"]
    lines += _nodes(picture, None, indent=4)
    for number, box in enumerate(picture.boxes):
        lines.append(f'    subgraph loop{number + 1}["{_text(box.heading)}"]')
        lines += _nodes(picture, number, indent=8)
        lines.append("    end")
    lines += [f"    {_link(link)}" for link in picture.links]
    return "\n".join(lines) + "\n"


def _nodes(picture: Picture, box: int | None, *, indent: int) -> Iterable[str]:
    for number, node in enumerate(picture.nodes):
        if node.box == box:
            yield f"{' ' * indent}s{number}{_node(node)}"


def _node(node: Node) -> str:
    opening, closing = _SHAPES[node.shape]
    name = f"{_text(node.name)} {node.times}".rstrip()
    return f'{opening}"{"<br>".join((name, *map(_text, node.notes)))}"{closing}'


def _link(link: NodeEdge) -> str:
    if link.kind == "service":
        return f's{link.source} <-. "{_text(link.label)}" .-> s{link.target}'
    if link.goes_back:
        return f's{link.source} -. "{_text(link.label)}" .-> s{link.target}'
    plain = _PLAIN_LABEL.fullmatch(link.label)
    label = link.label if plain else f'"{_text(link.label)}"'
    return f"s{link.source} -->{f'|{label}|' if label else ''} s{link.target}"


def _text(text: str) -> str:
    return text.translate(_CODES)


def _title(text: str) -> str:
    """A plain YAML scalar where it is one, else quoted: JSON's quotes are YAML's."""
    return text if _PLAIN_TITLE.fullmatch(text) else json.dumps(text)
