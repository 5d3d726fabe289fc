"""Examples at the end of a command's help."""

from __future__ import annotations

__all__ = ["examples"]

# What keeps typer from filling lines up.
_AS_IT_IS = "\b"


def examples(*lines: str, title: str = "Examples:") -> str:
    """The lines below a title, each as it is."""
    return "\n".join([_AS_IT_IS, title, *(f"  {line}" for line in lines)])
