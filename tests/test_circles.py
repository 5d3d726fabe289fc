"""The check of circles sees all imports, wherever they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.circles import circle_in, imports_of


@pytest.mark.parametrize(
    "lower",
    [
        "def late():\n    from rooms_of_a_house import attic\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rooms_of_a_house.attic import Roof\n",
        "from rooms_of_a_house import Roof\n",
    ],
    ids=["late", "for types", "by way of the face of the package"],
)
def test_a_circle_is_found_although_python_can_import_it(
    lower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven circles of modules were hidden in late imports and in imports for types."""
    house = tmp_path / "rooms_of_a_house"
    house.mkdir()
    (house / "__init__.py").write_text("from rooms_of_a_house.attic import Roof as Roof\n")
    (house / "attic.py").write_text("from rooms_of_a_house import cellar\n\nclass Roof: ...\n")
    (house / "cellar.py").write_text(lower)
    monkeypatch.syspath_prepend(tmp_path)
    assert {"rooms_of_a_house.attic", "rooms_of_a_house.cellar"} <= set(circle_in(imports_of("rooms_of_a_house")))
