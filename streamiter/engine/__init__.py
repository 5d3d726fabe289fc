"""What runs a flow. Each room imports from the rooms below it only:

=================  =====================================================================================
``processes``      flows in several processes: hosts, the supervisor, links, shared memory
``job``            the job: its coordinator and followers, barriers, checkpoints
``checkpointing``  the part of a process in checkpoints, commits, restores, other parallelism
``plan``           the placement of a flow, the plan of its tasks and channels, the settings of a job
``tasks``          the task: its chain of operators, its source, what it does at a barrier
``inbox``          the inbox of a task: what comes next, and what waits
``graph``          steps and edges, and what carries records along an edge
``states``         the states of keys: in memory, or on disk in RocksDB
``storage``        snapshots in stores, and queues that continue on disk
=================  =====================================================================================
"""
