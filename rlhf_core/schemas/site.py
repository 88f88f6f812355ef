"""Settings of a site for all its runs: the tables of ``rlhf.toml``."""

import fnmatch
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rlhf_core.schemas.base import NonNegativeSeconds, Positive, PositiveSeconds, Schema

Port = Annotated[int, Field(ge=1, le=65535)]
KeptDays = Annotated[int, Field(ge=0, le=36_500)]
"""Days to keep something, up to a century: a date before the year 1 cannot be computed."""
Occasion = Literal[
    "failed",
    "stopped",
    "completed",
    "cancelled",
    "cancelled_outside",
    "incident",
    "no_nodes",
    "approval",
    "approval_expired",
    "promotion_failed",
]

TRACKERS = ("mlflow", "tensorboard", "wandb")
"""Experiment trackers that runs in progress are exported to."""

PRIVATE_VARIABLES = (
    "PGPASSWORD",
    "RLHF_DATABASE_URL",
    "RLHF_NOTIFY_WEBHOOK_URL",
    "RLHF_PREFECT_AUTH",
    "RLHF_PREFECT_DATABASE_URL",
    "PREFECT_*",
)
"""Variables that only the control plane gets, with ``*`` for any text: they are hidden from user code in jobs and in
preflight. ``PGPASSWORD`` is the password for PostgreSQL's library if it is not in the URL of the history. All variables
of Prefect are included, because its passwords, keys, headers and database URLs get new names with new versions, and
nodes need none of its settings."""


def is_private(name: str) -> bool:
    """Return True if only the control plane gets a variable."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in PRIVATE_VARIABLES)


class PrefectSite(Schema):
    """``[prefect]``: settings of Prefect on this machine for `rlhf up`."""

    host: str = "127.0.0.1"
    """Address that the server and UI listen on. Every address requires the password."""
    port: Port = 4200
    """Their port."""
    url: str = ""
    """Address of the UI for browsers of the site (for instance behind a proxy); empty uses host and port."""
    hosts: tuple[str, ...] = ()
    """More names by which browsers and programs reach the server. Without them, it accepts only loopback, `host`, the
    name in `url`, and, if other machines can reach it, this machine's name and addresses."""
    database_url: str = ""
    """Database of the Prefect server: `postgresql+asyncpg://user@host/name`, or empty for SQLite in the home folder.
    Put a URL with a password into the environment variable `RLHF_PREFECT_DATABASE_URL`, which takes precedence."""
    pool: str = "rlhf"
    """Work pool of the deployments."""
    max_runs: Positive = 50
    """Maximum number of runs driven at once on this machine; others wait. Each is one process here, independent of its
    size on the cluster."""
    reconcile_s: PositiveSeconds = 15.0
    """Interval between comparisons of the database, Prefect and the scheduler, in seconds."""
    ingest_s: PositiveSeconds = 2.0
    """Interval at which the files of all active runs are read into the history, in seconds."""
    restart_s: NonNegativeSeconds = 5.0
    """Seconds between two health checks of the services that `rlhf up` started; a dead service is restarted at once. 0
    leaves both to the next `rlhf up`."""
    keep_days: Annotated[int, Field(ge=1, le=36_500)] = 30
    """Days that Prefect keeps flow runs after they have ended. The history keeps everything."""


class NotifySite(Schema):
    """``[notify]``: recipients and events of notifications, through automations of Prefect."""

    webhook_url: str = ""
    """Address to post a JSON message to. Put one that contains a secret into the environment variable
    `RLHF_NOTIFY_WEBHOOK_URL`, which takes precedence."""
    on: tuple[Occasion, ...] = (
        "failed",
        "cancelled_outside",
        "completed",
        "no_nodes",
        "approval",
        "approval_expired",
        "promotion_failed",
    )
    """Notifications to send: a run that `failed`, `completed` or was `cancelled`; of the failed ones, only those
    `stopped` by a failure that is not retried, without those that their checks refuse; of the cancelled ones, only
    those `cancelled_outside` of rlhf-flows (`scancel`); every `incident`, also one that is retried; a run whose nodes
    do not start (`no_nodes`, at once and then once a day); a pending `approval`, and one without an answer in time
    (`approval_expired`); a model that could not be written (`promotion_failed`)."""


class ExportSite(Schema):
    """``[export]``: experiment trackers to which the site daemon exports all runs in progress."""

    mlflow: str = ""
    """Tracking URI of MLflow (`http://mlflow.example:5000`), or a folder, in which `mlflow.db` is created; empty for
    none."""
    tensorboard: str = ""
    """Folder for event files, which `tensorboard --logdir` shows; empty for none."""
    wandb: str = ""
    """Address of a W&B server (`https://api.wandb.ai`), or a folder for offline runs, which `wandb sync` uploads; empty
    for none."""
    pass_environment: tuple[str, ...] = ()
    """Names of variables with the credentials of trackers, such as `WANDB_API_KEY` or `MLFLOW_TRACKING_PASSWORD`. Their
    values are read from the environment of the site daemon, or else from the file `RLHF_JOB_SECRETS`."""

    @field_validator(*TRACKERS)
    @classmethod
    def _is_place(cls, place: str) -> str:
        if not place:
            return place
        if "://" not in place:
            if not place.startswith("/"):
                raise ValueError(f"found {place!r}, expected an address with ://, or the absolute path of a folder")
            return place
        if urlsplit(place).password:
            raise ValueError("found an address with a password; name its variable in export.pass_environment instead")
        return place

    @property
    def trackers(self) -> dict[str, str]:
        """Folder or address of each tracker that is set."""
        places = {"mlflow": self.mlflow, "tensorboard": self.tensorboard, "wandb": self.wandb}
        return {name: place for name, place in places.items() if place}


class RetentionSite(Schema):
    """``[retention]``: rules by which the site daemon removes files."""

    checkpoints_days: KeptDays = 0
    """Days to keep checkpoints after the end of their run; 0 keeps all. The newest, the best of every evaluation
    except pass@k, promoted ones, and those that another run reads, if it is active or can be resumed, are always kept;
    those that were set aside, and what an interrupted save or removal has left, are not."""
    deployments_days: KeptDays = 30
    """Days to keep a deployed or submitted config and its code after their last use; 0 keeps all. Those of a
    deployment, of a flow run that is not completed, and of a run that can be resumed are always kept."""


class Request(Schema):
    """A run that was requested in Prefect but does not exist, because it waits or was refused."""

    run_id: str
    """Its future id, or the name of its flow run if that is not known yet."""
    flow_run_id: str
    deployment: str
    """Name of the requested deployment; empty without one."""
    state: str
    """`waiting`, `refused`, `cancelled` or `crashed`."""
    owner: str
    asked_at: datetime | None
    due_at: datetime | None
    why: str
    """Reason why it waits or does not exist."""
    url: str
    """Page of its flow run."""


class Requests(Schema):
    """``services/requests.json`` of the home folder: written by the site daemon, read by `rlhf runs`."""

    as_of: datetime
    requests: tuple[Request, ...] = ()


def requests_file(home: Path) -> Path:
    """Path of the file."""
    return home / "services" / "requests.json"
