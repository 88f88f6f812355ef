"""The Prefect server of a site: its addresses, password and settings, and those of its clients."""

import base64
import contextlib
import http
import ipaddress
import logging
import os
import secrets
import socket
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from flows.server.guards import Names, names_of
from flows.server.proxies import exemption, status_of
from rlhf_core.config.site import Site
from rlhf_core.errors import BadInput, PrefectUnavailable
from rlhf_core.files import private as private_files
from rlhf_core.files.whole import create_once
from rlhf_core.history.database import refuse_network_file_system
from rlhf_core.services.presence import ServiceState, private_folder, service_status
from rlhf_core.services.processes import wait_until

ANSWER_TIMEOUT_S = 10.0
"""Time that a server has to answer."""

START_IT = "`rlhf up` starts the server of this site; PREFECT_API_URL names another one."

HOME_MARKER = "RLHF_SERVICES_HOME"
"""Environment variable set in the services of a home folder, and inherited by everything they start."""

AUTH_VARIABLE = "RLHF_PREFECT_AUTH"
"""Variable with the password of the site's server, as ``user:password``."""
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"
"""Prefect's own variable for the password of a server."""
CLIENT_AUTH = "PREFECT_API_AUTH_STRING"
"""Prefect's own variable for the password that a client sends."""

DAY_S = 24 * 3600

SILENCE = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
}
"""All settings by which Prefect would send usage data to others."""


# ---------------------------------------------------------------------------------------------------------------------
# The server of the site


def own_url(site: Site) -> str:
    """Address of the API of the server that ``rlhf up`` starts, as programs on this machine reach it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(site.prefect.host, site.prefect.host)
    return f"http://{_in_url(host)}:{site.prefect.port}/api"


def ui_url(site: Site) -> str:
    """Address of its UI, as browsers reach it."""
    if site.prefect.url:
        return site.prefect.url.rstrip("/")
    host = socket.gethostname() if site.prefect.host in ("0.0.0.0", "::") else site.prefect.host
    return f"http://{_in_url(host)}:{site.prefect.port}"


def is_public(site: Site) -> bool:
    """True if other machines reach the server."""
    host = site.prefect.host
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def own_names(site: Site) -> Names:
    """Names that the server answers to: loopback, this machine's names if others reach it, and configured ones.

    If other machines reach the server, any numeric address is accepted: behind containers and routers, this machine may
    not know its own.
    """
    public, page = is_public(site), urlsplit(ui_url(site))
    names = [site.prefect.host, *site.prefect.hosts, page.netloc, urlsplit(configured_url()).netloc]
    names += [socket.gethostname(), socket.getfqdn()] if public else []
    return names_of(names, [f"{page.scheme}://{page.netloc}"], any_address=public)


def password_file(site: Site) -> Path:
    """Path of the file with the server's password, readable by this user alone."""
    return site.home / "prefect" / "auth"


def password(site: Site) -> str:
    """The password of the site's server, as ``user:password``.

    ``RLHF_PREFECT_AUTH`` wins over ``PREFECT_SERVER_API_AUTH_STRING``, and both over the file; if none of them is set,
    a password is generated and stored in the file.

    Raises:
        BadInput: the file cannot be written, is empty, belongs to another user, or others may read it.
    """
    given = os.environ.get(AUTH_VARIABLE) or os.environ.get(SERVER_AUTH)
    if given:
        return given
    path = password_file(site)
    if not path.exists():
        private_folder(path.parent)
        try:
            create_once(path, f"{new_password()}\n", private_files.FILE_MODE)
        except OSError as error:
            raise BadInput(
                f"cannot keep a password for the Prefect server in {path}: {error.strerror}. Make its folder writable, "
                f"with room in it, or set {AUTH_VARIABLE}"
            ) from None
    found = _private_text(path).strip()
    if not found:
        raise BadInput(f"{path} is empty, expected user:password; write one, or remove the file and one is made")
    return found


def new_password() -> str:
    return f"rlhf:{secrets.token_urlsafe(24)}"


def _private_text(path: Path) -> str:
    """Text of a file that holds a secret.

    Raises:
        BadInput: it is not this user's own file, or others may read it.
    """
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot read {path}, the password of the Prefect server: {error.strerror}") from None
    with file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid():
            raise BadInput(f"{path} holds the password of the Prefect server and belongs to user {found.st_uid}")
        if found.st_mode & 0o077:
            raise BadInput(f"{path} holds the password of the Prefect server and others may read it; chmod 600 {path}")
        return file.read()


def configured_url() -> str:
    """The server that this user has configured for Prefect, in the environment or the active profile; or empty."""
    return _configured("PREFECT_API_URL")


def _configured(setting: str) -> str:
    """Read a Prefect setting without importing Prefect, which would load all its settings."""
    if os.environ.get(setting):
        return os.environ[setting]
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    try:
        content = tomllib.loads((home / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return ""
    name = os.environ.get("PREFECT_PROFILE") or content.get("active", "")
    return str(content.get("profiles", {}).get(name, {}).get(setting, ""))


def connect(site: Site) -> str:
    """Make this process use the site's server: a configured one, else the one started by ``rlhf up``, else none.

    Call it before Prefect is imported. Returns the address of the API, or an empty string.
    """
    quiet_settings(site.home)
    own, configured = own_url(site), configured_url()
    if configured not in ("", own):
        if os.environ.get(AUTH_VARIABLE):
            os.environ.setdefault(CLIENT_AUTH, os.environ[AUTH_VARIABLE])
        os.environ.update(exemption(configured))
        return configured
    if not configured and (service_status(site.home, "server").state is ServiceState.STOPPED or not answers(own)):
        return ""
    os.environ.update(client_settings(site, own))
    return own


def client_settings(site: Site, url: str) -> dict[str, str]:
    """Settings for a client of a server.

    The site's password is only sent to its own server, unless it was set explicitly; a password that this user has set
    for Prefect together with an address is kept.
    """
    settings = {"PREFECT_API_URL": url, "PREFECT_UI_URL": ui_url(site), **exemption(url)}
    if configured_url() == url and _configured(CLIENT_AUTH) and not os.environ.get(AUTH_VARIABLE):
        return settings
    auth = password(site) if url == own_url(site) else os.environ.get(AUTH_VARIABLE, "")
    return {**settings, CLIENT_AUTH: auth} if auth else settings


def service_settings(site: Site) -> dict[str, str]:
    """Environment of every service of a site: its files in the home folder, and no telemetry."""
    url = configured_url() or own_url(site)
    return {
        **SILENCE,
        "RLHF_HOME": str(site.home),
        HOME_MARKER: str(site.home),
        "PREFECT_HOME": str(site.home / "prefect"),
        # Stays in the user's folder, regardless of PREFECT_HOME.
        "PREFECT_SERVER_MEMO_STORE_PATH": str(site.home / "prefect" / "memo_store.toml"),
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # A client that does not know its server must fail instead of starting one.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        **client_settings(site, url),
    }


def server_settings(site: Site) -> dict[str, str]:
    """Environment of the server, in addition to that of every service."""
    settings = {
        "PREFECT_API_DATABASE_CONNECTION_URL": site.prefect.database_url or f"sqlite+aiosqlite:///{_sqlite_file(site)}",
        "PREFECT_SERVER_API_HOST": site.prefect.host,
        "PREFECT_SERVER_API_PORT": str(site.prefect.port),
        # Relative, so that it works under any name and through any proxy.
        "PREFECT_UI_API_URL": "/api",
        # Prefect copies its pages before serving them, by default into its own package, which may be read-only.
        "PREFECT_UI_STATIC_DIRECTORY": str(site.home / "prefect" / "ui"),
        # By default Prefect lets pages of any site call the API from a local browser; only its own UI needs to.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ui_url(site),
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(site.prefect.keep_days * DAY_S),
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": f"P{site.prefect.keep_days}D",
        # By default, a restarted server no longer knows who holds the slots of its limits, and never frees them.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT__SERVER_FINAL": "1",
    }
    return {**settings, **access_settings(password(site))}


def _sqlite_file(site: Site) -> Path:
    return site.home / "prefect" / "prefect.db"


def access_settings(auth: str) -> dict[str, str]:
    """Settings that make a server require a password, and a CSRF token for writes from a browser."""
    return {SERVER_AUTH: auth, "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true"}


WORKER_SETTINGS = {
    "PREFECT_WORKER_QUERY_SECONDS": "5",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Flow runs start in the folder of the runs, where others may write: nothing is imported from it.
    "PYTHONSAFEPATH": "1",
}
"""Environment of the worker and of the flow runs that it starts, in addition to that of every service.

``PREFECT_RUNNER_CRASH_ON_CANCELLATION_FAILURE`` stays off: an outage of the server must not end the controllers of
healthy runs. The site daemon ends a flow run that can no longer be cancelled as a result.
"""


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# ---------------------------------------------------------------------------------------------------------------------
# Use of a server


def quiet_settings(home: Path) -> None:
    """Set the variables that Prefect reads at import: no telemetry, no log lines in the progress display.

    Prefect's files go under ``home``, unless this user already has settings in a Prefect home. Call it before
    ``flows.run`` is imported.
    """
    quiet = {
        **SILENCE,
        # Log lines still reach the server, as part of the flow run.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL": "CRITICAL",
    }
    if not (Path.home() / ".prefect" / "profiles.toml").exists():
        quiet["PREFECT_HOME"] = str(home / "prefect")
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    # The terminal need not show that a log line could not be sent: flows.tasks reports the lost server.
    logging.raiseExceptions = False


def server_answers() -> bool:
    """True if the current Prefect server answers within two seconds."""
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    return bool(url) and status_of(f"{url}/health", 2.0) is not None  # any: a hosted one may require a key


def answers(url: str) -> bool:
    """True if a Prefect server answers at an API address within two seconds. This needs no password."""
    return status_of(f"{url}/health", 2.0) == http.HTTPStatus.OK


def requires_password(url: str) -> bool:
    """False if the server at an API address answers without a password."""
    return _status_of_version(url) != http.HTTPStatus.OK


def accepts_password(url: str) -> bool:
    """True if anything answers at an API address, and does not reject the password of this process.

    Other ways to identify oneself to a server, such as a key, are left to Prefect.

    Raises:
        PrefectUnavailable: it rejects the password.
    """
    given = _configured(CLIENT_AUTH)
    status = _status_of_version(url, given)
    has_other = any(map(_configured, ("PREFECT_API_KEY", "PREFECT_CLIENT_CUSTOM_HEADERS")))
    if status != http.HTTPStatus.UNAUTHORIZED or has_other:
        return status is not None
    found = f"does not accept the password in {CLIENT_AUTH}" if given else "requires a password"
    raise PrefectUnavailable(
        f"the Prefect server at {url} {found}: set {AUTH_VARIABLE} to what `rlhf password` prints for the user of its "
        "services"
    )


def _status_of_version(url: str, auth: str = "") -> int | None:
    """HTTP status with which a server answers a question that may require a password; None without an answer."""
    headers = {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"} if auth else {}
    return status_of(f"{url}/admin/version", ANSWER_TIMEOUT_S, headers)


def answers_in_time(url: str) -> bool:
    """True if a server answers within some seconds, which allows for one that is busy or starting."""
    return wait_until(lambda: answers(url), ANSWER_TIMEOUT_S, 0.2)


def require_port_and_disk(site: Site) -> None:
    """Check before starting the server that it can listen on its port, and that a SQLite database is on a local disk.

    Raises:
        BadInput: another process listens there; the message names it, if this user may see it.
        UnsafeDatabase: the database would be on a network file system.
    """
    if not site.prefect.database_url:
        refuse_network_file_system(_sqlite_file(site), "Prefect's database", "RLHF_PREFECT_DATABASE_URL")
    host, port = site.prefect.host, site.prefect.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            probe.bind(address)
    except socket.gaierror as error:
        raise BadInput(f"prefect.host: found {host!r}, expected an address of this machine: {error.strerror}") from None
    except OSError as error:
        raise BadInput(
            f"the Prefect server cannot listen on {host} port {port}: {error.strerror}{_listener(port)}. "
            f"End that, or give the server another port: port under [prefect] in {site.home / 'rlhf.toml'}"
        ) from None


def _listener(port: int) -> str:
    """Description of the process that listens on a port of this machine, as far as this user may see it."""
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                return f" (process {one.pid}, {' '.join(psutil.Process(one.pid).cmdline())[:120]})"
    return ""
