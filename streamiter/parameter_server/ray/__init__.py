"""Shards in Ray actors (the extra ``ray``). These modules import the package ray only when a server on Ray is made."""
