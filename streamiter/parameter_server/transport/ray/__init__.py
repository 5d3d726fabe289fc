"""Shards in Ray actors: the extra ``ray``. Nothing here imports ray before a server is asked for on it."""
