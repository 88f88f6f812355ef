"""Hangs: alive or silent (``liveness``), provably at a standstill (``standstill``), and which rank is to blame
(``verdict``)."""
