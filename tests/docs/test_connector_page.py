"""The connector of docs/your-own-connector.md is found by its URL, and keeps the contract of topics."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from topics.contract_lifecycle import LifecycleContract
from topics.contract_range import RangeContract
from topics.contract_reading import ReadingContract
from topics.contract_writing import WritingContract
from topics.topic_case import TopicCase

from streamiter.topics import topic
from streamiter.topics.urls import ENTRY_POINT_GROUP

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-connector.md").read_text(encoding="utf-8")


def first_block(language: str) -> str:
    """Return the first code block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


class TestConnectorOfThePage(WritingContract, RangeContract, ReadingContract, LifecycleContract):
    """A reader copied a connector that lost records, and that no URL led to."""

    @pytest.fixture
    def case(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TopicCase]:
        [(scheme, value)] = tomllib.loads(first_block("toml"))["project"]["entry-points"][ENTRY_POINT_GROUP].items()
        module = value.partition(":")[0]
        (tmp_path / f"{module}.py").write_text(first_block("python"), encoding="utf-8")
        metadata = tmp_path / f"{module}-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {module}\nVersion: 1\n", encoding="utf-8")
        entry_point = f"[{ENTRY_POINT_GROUP}]\n{scheme} = {value}\n"
        (metadata / "entry_points.txt").write_text(entry_point, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        yield TopicCase(handle=lambda name: topic(f"{scheme}://{name}"))
        sys.modules.pop(module, None)
