"""What the tests of jobs under faults share."""

from job_faults.service import serve

__all__ = ["serve"]
