"""The page on Kafka has every option, with its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from streamiter_kafka.options import KafkaOptions

PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"


def test_the_page_has_every_option_and_its_default() -> None:
    """A page had other defaults than the code, and lacked the options of a year."""
    section = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("## Reading")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE))
    assert documented == {option.name: shown(option.default) for option in fields(KafkaOptions)}


def shown(default: object) -> str:
    match default:
        case None:
            return "–"
        case bool():
            return f"`{str(default).lower()}`"
        case int() | float():
            return f"{default:,.10g}"
    return f"`{default}`"
