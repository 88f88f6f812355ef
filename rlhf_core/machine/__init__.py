"""The machine a process is on: accounts of its operating system, main memory that may be used, Python interpreters and
environments of other programs."""
