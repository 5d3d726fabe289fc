"""What flows, and how it is written: records and their rows, times, numbers, plain data, keys and partitions.

No module here knows of a flow. ``records`` and ``origins``: batches, control records, where the records of a batch were
read. ``tables``, ``sparse_rows``, ``named_rows``, ``crossed_rows``: rows; ``field_kinds``, ``field_states``,
``known_fields``: what the fields of rows are. ``plain_data`` (with ``encoding``, ``plain_format`` and ``deferred``):
values and batches as bytes. ``subtasks``: which subtask has a key, or a partition. ``helpers``: what all rooms use.
"""
