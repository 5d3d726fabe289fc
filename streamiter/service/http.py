"""A placeholder for the server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from streamiter.service.observations import Observations
from streamiter.service.settings import HttpSettings


@contextlib.asynccontextmanager
async def serving(observations: Observations, settings: HttpSettings) -> AsyncIterator[None]:
    """Serve nothing."""
    yield
