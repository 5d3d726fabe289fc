"""Helpers of all rooms: the clock, closing, locks of files, names of objects, compiled functions, notebooks."""
