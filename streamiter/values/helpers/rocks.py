"""The memory and the options of databases of RocksDB; the states of flows and the rows of followers are in such ones.

This module imports rocksdict, so it is imported where a database is opened. What the texts of errors say is in
:mod:`streamiter.values.helpers.files`.
"""

from __future__ import annotations

from typing import Final

from rocksdict import BlockBasedIndexType, BlockBasedOptions, Cache, DBCompressionType, Options, WriteBufferManager

# An update of one row then uploads a file of this size at the most, besides what compactions rewrite.
_FILE_BYTES: Final = 32 << 20
# One false positive in a hundred: so a new key rarely reads a block.
_FILTER_BITS_PER_KEY: Final = 10
# All files are named in it, about 100 bytes each; a checkpoint copies it.
_MANIFEST_BYTES: Final = 4 << 20
_LOG_BYTES: Final = 1 << 20


class DatabaseMemory:
    """The memory that all databases of one owner in one process share: blocks, indexes, filters and memtables."""

    def __init__(self, size_bytes: int) -> None:
        self.cache = Cache(size_bytes)
        # Memtables are charged to the cache, so both stay below its size.
        self.memtables = WriteBufferManager.new_write_buffer_manager_with_cache(size_bytes // 2, False, self.cache)

    def options(self, memtable_bytes: int, *, is_large: bool) -> Options:
        """Return the options of a database, whose files are compressed if it ``is_large``.

        A memtable that is full is written while the next one is filled.
        """
        blocks = BlockBasedOptions()
        blocks.set_block_cache(self.cache)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        blocks.set_bloom_filter(_FILTER_BITS_PER_KEY, False)
        blocks.set_format_version(5)
        if is_large:
            # A filter of a whole file has megabytes. One that is larger than a shard of the cache, of which there are
            # up to 64, would be read again for each key. In a small database this makes reads a quarter slower.
            blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
            blocks.set_partition_filters(True)
            blocks.set_pin_top_level_index_and_filter(True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(blocks)
        options.set_write_buffer_manager(self.memtables)
        options.set_write_buffer_size(memtable_bytes)
        options.set_target_file_size_base(_FILE_BYTES)
        options.set_compression_type(DBCompressionType.lz4() if is_large else DBCompressionType.none())
        options.set_max_background_jobs(2)
        options.set_max_manifest_file_size(_MANIFEST_BYTES)
        options.set_max_log_file_size(_LOG_BYTES)
        options.set_keep_log_file_num(1)
        options.set_stats_dump_period_sec(0)
        return options
