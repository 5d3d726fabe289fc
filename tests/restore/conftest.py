"""One fresh process for all checks here."""

from collections.abc import Iterator

import pytest

from streamiter.testing import RestoreProcess


@pytest.fixture(scope="session")
def restore_process() -> Iterator[RestoreProcess]:
    with RestoreProcess() as process:
        yield process
