"""The directive ``commands``: a section for each command of ``streamiter``, with the help that it prints."""

from __future__ import annotations

from typing import Any

import typer.main
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from streamiter.cli.app import app as program

COLUMNS = 92
"""The width of the help: it stands beside the navigation without a scroll bar."""


class Commands(SphinxDirective):
    """Shows the help of each command, as a terminal does."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        lines = [line for name, command in _commands() for line in _section(name, command)]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def _commands() -> list[tuple[str, Any]]:
    top: Any = typer.main.get_command(program)
    named = list(top.commands.items())
    return [
        each
        for name, command in named
        for each in [
            (name, command),
            *((f"{name} {below}", it) for below, it in getattr(command, "commands", {}).items()),
        ]
    ]


def _section(name: str, command: Any) -> list[str]:
    context: Any = command.context_class(command, info_name=f"streamiter {name}", max_content_width=COLUMNS)
    context.terminal_width = COLUMNS
    level = "##" if " " not in name else "###"
    return [f"{level} `{name}`", "", "```text", *command.get_help(context).splitlines(), "```", ""]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive to Sphinx."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
