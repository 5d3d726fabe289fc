"""The public names, which users import, are those in ``public_names.txt``.

``PYTHONPATH=tests python tests/test_public_names.py`` writes the names as they are now, to be read in a review.
"""

import importlib
import textwrap
import typing
from pathlib import Path

import pytest
from support.refusals import sections

FILE = Path(__file__).with_name("public_names.txt")
NAMES = {room: text.split() for room, text in sections(FILE).items()}


@pytest.mark.parametrize(("room", "names"), NAMES.items())
def test_the_public_names_are_complete_and_documented(room: str, names: list[str]) -> None:
    """A name was missing and broke its users' programs, or was added by mistake and must be kept for ever."""
    module = importlib.import_module(room)
    assert sorted(module.__all__) == names
    values = {name: getattr(module, name) for name in names}
    assert [name for name, value in values.items() if not _is_documented(value)] == []


def test_names_that_need_an_extra_are_imported_when_they_are_used() -> None:
    """``from streamiter.learn import *`` must not need scikit-learn."""
    learn = importlib.import_module("streamiter.learn")
    for name in ("OnlineClassifier", "OnlineRegressor"):
        assert name not in learn.__all__
        assert name in dir(learn)
        assert _is_documented(getattr(learn, name))


def _is_documented(value: object) -> bool:
    # An alias of a type (a union, a Callable) cannot have its own docstring.
    return bool(value.__doc__) or typing.get_origin(value) is not None


def write() -> None:
    """Write the file again, with the rooms that it has and their names as they are now."""
    written = FILE.read_text(encoding="utf-8").partition("\n== ")[0].rstrip() + "\n"
    for room in NAMES:
        names = " ".join(sorted(importlib.import_module(room).__all__))
        written += f"\n== {room}\n{textwrap.fill(names, 120, break_long_words=False, break_on_hyphens=False)}\n"
    FILE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    write()
