"""The command line: ``streamiter demo · run · draw · topics · models · checkpoints``."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The program ``streamiter``."""
    from streamiter.cli.app import run_app

    run_app()
