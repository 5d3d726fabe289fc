"""All checks in this directory share one fresh process."""

from collections.abc import Iterator

import pytest

from streamiter.testing import RestoreProcess


@pytest.fixture(scope="session")
def restore_process() -> Iterator[RestoreProcess]:
    with RestoreProcess() as process:
        yield process
