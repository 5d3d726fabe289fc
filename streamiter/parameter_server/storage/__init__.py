"""How the numbers of a matrix lie in memory."""

from streamiter.parameter_server.matrix import BlockRange, Matrix
from streamiter.parameter_server.storage.block import Block
from streamiter.parameter_server.storage.dense import DenseBlock
from streamiter.parameter_server.storage.sparse import SparseBlock

__all__ = ["Block", "DenseBlock", "SparseBlock", "make_block"]


def make_block(matrix: Matrix, block: BlockRange) -> Block:
    """A block of a matrix, each number the matrix's default."""
    return SparseBlock(matrix, block) if matrix.sparse else DenseBlock(matrix, block)
