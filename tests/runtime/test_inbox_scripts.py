"""The inbox does what each section of ``inbox_scripts.txt`` says.

``PYTHONPATH=tests python tests/runtime/test_inbox_scripts.py`` writes what it does now.
"""

from pathlib import Path

import pytest
from runtime.inbox_script import Script
from support.refusals import rewrite, sections, with_texts_now

FILE = Path(__file__).with_name("inbox_scripts.txt")


def as_now(section: str) -> str:
    script = Script()
    return with_texts_now(section, script.act)


@pytest.mark.parametrize("section", sections(FILE))
def test_the_operator_is_told_what_the_section_says(section: str) -> None:
    """Each section tells the incident that it prevents."""
    text = sections(FILE)[section]
    assert as_now(text) == text


if __name__ == "__main__":
    rewrite(FILE, lambda _, text: as_now(text))
