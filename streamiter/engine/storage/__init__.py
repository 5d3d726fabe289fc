"""Snapshots in stores, and queues of batches that continue on disk.

``disk_queue`` and ``replay_cache`` (with ``disk_batches``) keep batches in memory up to a limit and then on disk.
``snapshot`` and ``snapshot_file`` are a stored snapshot and its file; ``store`` keeps snapshots, ``flow_checkpoints``
those of one flow, and ``flow_record`` has the rules of claims and commits; they use ``blobs``: in memory, in a folder
(``folder_blobs``) or in an object store (``object_blobs``).
"""
