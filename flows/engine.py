"""``python -m flows.engine``: the process of one flow run. It is Prefect's own, with rarer collections of garbage."""

import runpy

from rlhf_core.garbage import collect_rarely

if __name__ == "__main__":
    collect_rarely()
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
