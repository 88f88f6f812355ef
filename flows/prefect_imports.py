"""Import of Prefect in half of its time.

python -m flows.prefect_imports MODULE [ARGUMENT]...    runs a module of Prefect after it
"""

import runpy
import sys

from rlhf_core.garbage import collect_rarely, uncollected
from rlhf_core.hidden_modules import hidden


def import_prefect() -> None:
    """Import what flows, the worker and deployments need of Prefect. Call it after Prefect's settings are in place.

    If pandas is installed, Prefect's cache policies import it to order the columns of data frames among the arguments
    of cached tasks. No task here is cached, and pandas takes half of the time and of the memory of these imports.
    """
    with uncollected(), hidden("pandas"):
        import prefect.cache_policies  # noqa: F401


if __name__ == "__main__":
    collect_rarely()
    import_prefect()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
