"""Import of Prefect in half of its time, without pandas.

    python -m flows.prefect_imports MODULE [ARGUMENT]...    runs a module of Prefect after it

If pandas is installed, Prefect's cache policies import it to order the columns of data frames among the arguments of
cached tasks. No task here is cached, and pandas takes half of the time and of the memory of these imports.
"""

from rlhf_core.garbage import run_module, uncollected
from rlhf_core.hidden_modules import hidden


def import_prefect() -> None:
    """Import what flows, the worker and deployments need of Prefect. Call it after Prefect's settings are in place."""
    with uncollected(), hidden("pandas"):
        import prefect.cache_policies  # noqa: F401


if __name__ == "__main__":
    import_prefect()
    run_module()
