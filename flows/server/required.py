"""Check for a Prefect server in commands that need one, with advice if there is none. Imports no Prefect."""

import contextlib
import os

from flows.server.settings import START_IT, accepts_password, client_settings, connect, own_url
from rlhf_core.config.site import Site
from rlhf_core.errors import PrefectUnavailable
from rlhf_core.files import private as private_files
from rlhf_core.services.presence import ServiceFiles, ServiceState, service_status
from rlhf_core.services.supervisord import Supervisord


def require(site: Site) -> None:
    """Connect this process to a server that answers (:func:`flows.server.settings.connect`).

    Raises:
        PrefectUnavailable: there is none, or it does not answer, or it does not accept the password; the message gives
            its expected address.
    """
    url = connect(site)
    if url and accepts_password(url):
        with contextlib.suppress(OSError):  # Prefect makes its own folder there, but none above it, and warns
            private_files.make_folder(site.home)
        return
    if url and url != own_url(site):
        raise PrefectUnavailable(
            f"the Prefect server at {url} does not answer; PREFECT_API_URL names it, in the environment or in "
            f"Prefect's active profile. Start it, or unset PREFECT_API_URL and use the one of `rlhf up`"
        )
    if not _has_server(site):
        raise PrefectUnavailable(f"no Prefect server is configured, and this site has none yet. {START_IT}")
    raise PrefectUnavailable(
        f"the Prefect server of this site does not answer at {own_url(site)}: {_why_silent(site)}; "
        f"`rlhf up --status` says how the services stand; its log is {ServiceFiles(site.home, 'server').log}"
    )


def _why_silent(site: Site) -> str:
    """The reason why the server of a site does not answer, with advice."""
    found = service_status(site.home, "server")
    process = f"process {found.pid}" if found.pid else "it"
    if found.state is ServiceState.ELSEWHERE and found.record is not None:
        return f"it runs on {found.record.host}. PREFECT_API_URL has to name it here"
    is_starting = found.state is ServiceState.STOPPED and Supervisord(site.home).has_process("server")
    if is_starting or found.state is ServiceState.STARTING:
        return f"{process} is starting. `rlhf up` waits until it is ready"
    gone = "its process is gone" if found.state is ServiceState.STOPPED else f"{process} is silent"
    return f"{gone}. `rlhf up` starts it again"


def connect_if_any(site: Site) -> None:
    """Connect this process to the server of a site, which may be down; for a site without one, do nothing.

    Raises:
        PrefectUnavailable: it does not accept the password.
    """
    url = connect(site)
    if url:
        accepts_password(url)
    elif _has_server(site):
        os.environ.update(client_settings(site, own_url(site)))


def _has_server(site: Site) -> bool:
    """True if `rlhf up` manages a server for a site, or one is running."""
    managed = "server" in Supervisord(site.home).programs()
    return managed or service_status(site.home, "server").state is not ServiceState.STOPPED
