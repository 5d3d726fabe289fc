"""The matrices that one process knows: their settings, how they are cut, and how they are made on the shards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar, final

from streamiter.errors import ParameterServerError, UnknownMatrix
from streamiter.parameter_server.calls import ShardLink, WaitingReply
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
from streamiter.parameter_server.matrix_shard import check_first_values
from streamiter.parameter_server.requests import CreateRequest, ForgetRequest, Request

R = TypeVar("R")


@final
class MatrixDirectory:
    """The matrices that are known in this process: shared by a server and its clients."""

    def __init__(
        self,
        links: Sequence[ShardLink],
        look_up: Callable[[str], Awaitable[Matrix | None]] | None = None,
    ) -> None:
        """``look_up`` asks the shards for a matrix, if matrices may be made in other processes."""
        self._links = links
        self._look_up = look_up
        self._matrices: dict[str, tuple[Matrix, MatrixPartitioning]] = {}

    def names(self) -> list[str]:
        """Return the names of all matrices, in the order they were made."""
        return list(self._matrices)

    def matrix(self, name: str) -> Matrix:
        """Return the settings of a matrix that is known here."""
        return self._matrices[name][0]

    async def find(self, name: str) -> tuple[Matrix, MatrixPartitioning]:
        """Return a matrix and its partitioning; raises UnknownMatrix."""
        found = self._matrices.get(name)
        if found is None and self._look_up is not None and (matrix := await self._look_up(name)) is not None:
            found = self._matrices[name] = (matrix, MatrixPartitioning(matrix, len(self._links)))
        if found is None:
            raise UnknownMatrix(
                f"matrix {name!r}: expected one of {', '.join(map(repr, self._matrices)) or 'none yet'}, given "
                f"{name!r}; make it first, with create_matrix"
            )
        return found

    async def create(self, matrix: Matrix) -> None:
        """Make a matrix on the shards that get blocks of it; nothing happens if it exists with the same settings."""
        if (there := self._matrices.get(matrix.name)) is not None:
            if (difference := there[0].differs_from(matrix)) is not None:
                raise ParameterServerError(
                    f"matrix {matrix.name!r}: expected the settings it was made with, given {difference}; give it "
                    "another name, or the same settings"
                )
            return
        partitioning = MatrixPartitioning(matrix, len(self._links))
        check_first_values(matrix, partitioning)
        holders = dict.fromkeys(block.shard for block in partitioning.blocks)
        await self._make(matrix, [self._links[shard] for shard in holders])
        self._matrices[matrix.name] = (matrix, partitioning)

    async def _make(self, matrix: Matrix, holders: Sequence[ShardLink]) -> None:
        """Make a matrix on all of these shards; if a function of ``init=`` fails on one of them, on none."""
        replies = [_sent(link, CreateRequest(matrix, len(self._links))) for link in holders]
        made: list[ShardLink] = []
        failure: Exception | None = None
        for link, reply in zip(holders, replies, strict=True):
            try:
                if await reply:
                    made.append(link)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            for link in made:
                # A shard that is lost meanwhile has forgotten the matrix. The error says why the matrix failed.
                with suppress(ParameterServerError):
                    await _sent(link, ForgetRequest(matrix.name))
            raise failure


def _sent(link: ShardLink, request: Request[R]) -> WaitingReply[R]:
    """Send a request, and return a waiting reply even if the request is refused at once.

    So all shards are asked before the first reply is awaited.
    """
    reply: WaitingReply[R] = WaitingReply()
    try:
        sent = link.send(request)
    except Exception as error:
        reply.fail(error)
        return reply
    if isinstance(sent, WaitingReply):
        return sent
    reply.succeed(sent)
    return reply
