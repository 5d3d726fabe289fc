"""The file of a service: its tables, all its errors at once, and a proposal of one."""
