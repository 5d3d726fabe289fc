"""The page on operations names all errors, metrics and alerts, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import streamiter.errors
from streamiter.service import service
from streamiter.service.logs import figures_of
from streamiter.service.observations import Observations

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
RULES = ROOT / "examples" / "online_service" / "prometheus" / "rules.yaml"


def rows(title: str) -> list[str]:
    """Return the names in the first column of the first table below a title."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)[`{]", cell)]


def test_the_page_says_what_to_do_for_each_error() -> None:
    """An error came at night, and the page for the people on duty did not have it."""
    tree = re.findall(r"^[│ ]*[├└]── (\w+) ", streamiter.errors.__doc__ or "", re.MULTILINE)
    assert rows("Errors") == ["StreamiterError", *tree]


def test_the_page_explains_each_alert() -> None:
    """An alert fired, and no page explained it."""
    [group] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = [rule["alert"] for rule in group["rules"]]
    assert [name for name in rows("Metrics") if name in alerts] == alerts


def test_the_page_has_all_fields_of_the_log() -> None:
    """A panel of the log showed nothing, because a field had another name than on the page."""
    figures = figures_of(Observations("clicks"), 30.0)
    assert rows("Logs") == ["time", "level", "logger", "message", "traceback", *figures]


def test_the_page_has_all_exit_codes() -> None:
    """A supervisor restarted a service that another run had replaced, and the two took over from each other."""
    section = PAGE.split("\n## Exit codes\n")[1].split("\n## ")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    ends = {service.SUCCEEDED, service.FAILED, service.STALLED, service.TAKEN_OVER, service.ABORTED}
    assert codes == ends | {2}  # 2 is the code of a wrong command line.
