"""Shared fixtures for tests of jobs under faults."""

from job_faults.service import serve

__all__ = ["serve"]
