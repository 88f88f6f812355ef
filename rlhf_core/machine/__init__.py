"""The machine that a process runs on: operating system accounts, usable main memory, and Python interpreters and
environments of other programs."""
