"""Detection of hangs: silence (``liveness``), proof of a standstill (``standstill``), and the responsible rank
(``verdict``)."""
