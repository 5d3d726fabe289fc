"""The public names: what acceptance checks and users import."""

from __future__ import annotations

import importlib

import pytest

import streamiter


def test_the_public_names_are_these() -> None:
    """A name that disappears breaks whoever uses it; one that slips in must be kept for ever."""
    assert sorted(streamiter.__all__) == [
        "Columns",
        "Flow",
        "IterationBodyResult",
        "IterationConfig",
        "IterationListener",
        "Json",
        "Operator",
        "OutputTag",
        "Stream",
        "connect",
        "epochs_every",
        "iterate_unbounded_streams",
        "topic",
    ]


@pytest.mark.parametrize("name", streamiter.__all__)
def test_each_public_name_is_there_and_says_what_it_is_for(name: str) -> None:
    """``from streamiter import *`` fails as a whole if one of the names does not exist."""
    assert getattr(streamiter, name).__doc__


@pytest.mark.parametrize("room", ["streamiter.testing", "streamiter.operators", "streamiter.topics"])
def test_rooms_with_names_of_their_own_give_all_they_promise(room: str) -> None:
    """The same for the packages that users import from beside the first one."""
    module = importlib.import_module(room)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []
