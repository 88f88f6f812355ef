"""An idle service program; with `deaf`, it ignores SIGTERM."""

import os
import signal
import sys
import time
from pathlib import Path

from rlhf_core.services.presence import holding
from rlhf_core.services.processes import die_with_parent

name = sys.argv[1]
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif "SUPERVISOR_ENABLED" in os.environ:
    die_with_parent()
if Path("fails").exists():
    sys.exit("it cannot start")
with holding(Path(os.environ["RLHF_HOME"]), name) as beat:
    while True:
        beat()
        time.sleep(0.1)
