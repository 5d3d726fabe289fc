"""Add a built site to the folder of all versions: ``python docs/site/publish.py build/site PAGES 0.1``.

The folder is what the web server shows. It has a folder for each version, ``versions.json`` for the choice of the
version on each page, and a first page that leads to the newest release, or to ``main`` while there is none.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ADDRESS = "https://streamiter.github.io/streamiter"


def publish(site: Path, pages: Path, version: str) -> None:
    """Put the site into ``pages/version`` in place of an earlier one, and write what names the versions."""
    if not re.fullmatch(r"main|\d+\.\d+", version):
        raise SystemExit(f"publish: version: expected main or a number such as 0.1, given {version!r}")
    if not (site / "index.html").is_file():
        raise SystemExit(f"publish: {site}: expected a built site, given no index.html; run: make site")
    folder = pages / version
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(site, folder, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    versions = published(pages)
    newest = versions[0]
    choice = [
        {
            "version": each,
            "name": f"{each} (newest)" if each == newest else each,
            "url": f"{ADDRESS}/{each}/",
            "preferred": each == newest,
        }
        for each in versions
    ]
    (pages / "versions.json").write_text(json.dumps(choice, indent=2) + "\n", encoding="utf-8")
    _lead_to(pages, newest)
    (pages / ".nojekyll").touch()  # GitHub would leave out folders whose names begin with _


def _lead_to(pages: Path, newest: str) -> None:
    """Make the first page, and the folder ``newest``, whose pages lead to those of the newest version.

    Messages of the program and the files that it writes name pages of that folder.
    """
    shutil.rmtree(pages / "newest", ignore_errors=True)
    _redirect(pages / "index.html", f"{newest}/")
    for page in sorted((pages / newest).rglob("*.html")):
        inner = page.relative_to(pages / newest)
        up = "../" * len(inner.parts)
        _redirect(pages / "newest" / inner, f"{up}{newest}/{inner.as_posix()}")


def _redirect(page: Path, target: str) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>streamiter</title>\n'
        f'<script>location.replace("{target}" + location.hash)</script>\n'
        f'<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript>\n'
        f'</head><body><a href="{target}">streamiter</a></body></html>\n',
        encoding="utf-8",
    )


def published(pages: Path) -> list[str]:
    """Return the versions in the folder: the newest release first, ``main`` last."""
    names = [path.parent.name for path in pages.glob("*/index.html") if path.parent.name != "newest"]
    numbers = [name for name in names if re.fullmatch(r"\d+\.\d+", name)]
    numbers.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    return numbers + [name for name in names if name == "main"]


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
