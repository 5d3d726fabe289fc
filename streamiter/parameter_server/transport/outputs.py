"""Arrays that a caller wants filled: they stay here, and are filled when the reply comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.requests import Add, Get, GetReply

__all__ = ["Outputs", "fill", "without_outputs"]

Outputs = list[npt.NDArray[Any] | None] | None
"""For each part of a get where to write it; None: there is nothing to write."""


def without_outputs(request: Any) -> tuple[Any, Outputs]:
    """The request as it can be sent, and the arrays that its reply is to be written to."""
    if isinstance(request, Add) and request.get is not None:
        get, outputs = without_outputs(request.get)
        return (request if outputs is None else replace(request, get=get)), outputs
    if not isinstance(request, Get) or all(part.out is None for part in request.parts):
        return request, None
    return (
        replace(request, parts=[part._replace(out=None) for part in request.parts]),
        [part.out for part in request.parts],
    )


def fill(reply: Any, outputs: Outputs) -> Any:
    """The reply, with its values in these arrays."""
    if outputs is None:
        return reply
    assert isinstance(reply, GetReply)
    values = list(reply.values)
    for index, out in enumerate(outputs):
        if out is not None:
            np.copyto(out, values[index])
            values[index] = out
    return reply._replace(values=values)
