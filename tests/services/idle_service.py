"""An idle service program; with `deaf`, it ignores SIGTERM."""

import os
import signal
import sys
import time
from pathlib import Path

from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.services.presence import holding

name = sys.argv[1]
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif "SUPERVISOR_ENABLED" in os.environ:
    die_with_parent(signal.SIGTERM)
if Path("fails").exists():
    sys.exit("it cannot start")
with holding(Path(os.environ["RLHF_HOME"]), name) as beat:
    while True:
        beat()
        time.sleep(0.1)
