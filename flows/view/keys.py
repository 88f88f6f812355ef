"""Names under which Prefect keeps what it shows of a run."""


def artifact_key(run_id: str, what: str = "incidents") -> str:
    """Key of an artifact of a run: lower-case letters, digits and dashes."""
    return f"rlhf-{what}-{run_id.replace('_', '-')}"


def artifact_link(run_id: str, what: str) -> str:
    """Link from the page of one artifact of a run to another one, in the old UI and in the new one."""
    return f"../key/{artifact_key(run_id, what)}"
