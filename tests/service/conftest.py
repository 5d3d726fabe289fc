"""Fixtures of the tests of the service."""

import functools

import pytest

from streamiter.topics import urls


@pytest.fixture
def connectors_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for the installed connectors takes 5 ms: too long for each of hundreds of files that a test reads."""
    monkeypatch.setattr(urls, "_entry_points", functools.cache(urls._entry_points))
