"""How the numbers of a matrix are stored in memory: dense and sparse blocks, and blocks of features."""

from streamiter.parameter_server.matrix import BlockRange, Matrix
from streamiter.parameter_server.storage.block import Block, DenseBlock, ShardBlock
from streamiter.parameter_server.storage.feature_block import FeatureBlock
from streamiter.parameter_server.storage.sparse import SparseBlock

__all__ = ["Block", "DenseBlock", "FeatureBlock", "ShardBlock", "SparseBlock", "make_block"]


def make_block(matrix: Matrix, block: BlockRange) -> ShardBlock:
    """Return a new block of a matrix, in which each number is the matrix's default."""
    if matrix.admission is not None:
        return FeatureBlock(matrix, block)
    return SparseBlock(matrix, block) if matrix.sparse else DenseBlock(matrix, block)
