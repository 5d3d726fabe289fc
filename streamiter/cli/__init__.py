"""The command line.

Its commands: ``demo · run · serve · draw · train · predict · network · topics · models · checkpoints``.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the program ``streamiter``."""
    from streamiter.cli.app import run_app

    run_app()
