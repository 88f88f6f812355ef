"""Attacks on a site that need no server: locks held by another user, planted modules, unauthenticated names."""

import ast
import asyncio
import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_fakes import make_spec
from process_tools import Rlhf
from site_stranger import STRANGER, as_stranger, needs_root, page_of_a_stranger

from flows import services
from flows.deployments import work_pool
from flows.gate import Approval
from flows.server import settings as server
from flows.server.guards import Authenticated, Known, Limited, Message, Names, Receive, Scope, Send, names_of
from rlhf_core.cli.main import execute
from rlhf_core.config.site import load_site
from rlhf_core.control.approval import Answered
from rlhf_core.errors import BadInput
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.prepare import prepare
from rlhf_core.launch.start import agent_command
from rlhf_core.machine.accounts import account, attributed_here, user_name
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState
from rlhf_core.schemas.base import LABEL_CHARACTERS
from rlhf_core.services import supervisord
from rlhf_core.services.presence import ServiceState, alone, holding, service_status
from rlhf_core.services.supervisord import Program, Supervisord
from rlhf_core.text.formatting import THROUGH_PREFECT, attributed
from rlhf_core.watchdog.ingest import sync

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home() -> Iterator[Path]:
    """Home folder with the former permissions: all users may enter it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Locks


def hold(path: Path) -> str:
    """Hold a lock until this process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return "held"


@needs_root
def test_another_user_cannot_hold_the_locks_of_the_services(home: Path) -> None:
    old = home / "services"
    old.mkdir(mode=0o755)
    for name in ("up", "server", "worker"):
        (old / f"{name}.lock").touch(0o644)
    assert as_stranger(lambda: hold(old / "up.lock")) == "held", "negative control: the former behaviour"
    with alone(home), holding(home, "server") as beat:
        beat()
        for name in ("up.lock", "server.lock", "worker.lock", "server.beat", "server.json"):
            assert as_stranger(lambda name=name: hold(old / name)) == "PermissionError"
        assert service_status(home, "server").state is ServiceState.RUNNING
    assert old.stat().st_mode & 0o777 == 0o700
    assert (old / "server.lock").stat().st_mode & 0o777 == 0o600


@needs_root
def test_another_user_cannot_call_supervisord(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, supervisord would start programs for them as the user of the services."""
    monkeypatch.setattr(supervisord, "_command", lambda *_: "sleep 60")
    manager = Supervisord(home)
    manager.configure([Program("worker", 10, 1)], 5.0)
    manager.start(os.environ)
    try:
        (socket_file,) = (home / "services").glob("*.sock")
        assert reach(socket_file) == "reached", "negative control"
        assert as_stranger(lambda: reach(socket_file)) == "PermissionError"
        (home / "services").chmod(0o755)
        assert as_stranger(lambda: reach(socket_file)) == "PermissionError", "its own mode is a second barrier"
        (home / "services").chmod(0o700)
    finally:
        manager.shut_down(20)
    assert not manager.pid()


def reach(path: Path) -> str:
    """Connect to a unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
    return "reached"


@needs_root
def test_a_folder_of_another_users_is_not_used(home: Path) -> None:
    (home / "services").mkdir()
    os.chown(home / "services", STRANGER, STRANGER)
    with pytest.raises(BadInput, match=f"belongs to user {STRANGER}"), alone(home):
        pytest.fail("its locks are his")


def test_a_lock_that_is_a_link_is_not_followed(home: Path) -> None:
    elsewhere = home / "elsewhere"
    elsewhere.write_text("kept")
    (home / "services").mkdir()
    for name in ("up", "worker"):
        (home / "services" / f"{name}.lock").symlink_to(elsewhere)
    with pytest.raises(BadInput, match=r"up\.lock"), alone(home):
        pytest.fail("it leads elsewhere")
    with pytest.raises(BadInput, match=r"worker\.lock"), holding(home, "worker"):
        pytest.fail("it leads elsewhere")
    assert elsewhere.read_text() == "kept"


@needs_root
def test_a_password_that_another_user_wrote_is_refused(home: Path) -> None:
    site = load_site({"RLHF_HOME": str(home)})
    file = server.password_file(site)
    file.parent.mkdir()
    file.write_text("rlhf:his own")
    file.chmod(0o600)
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(BadInput, match=f"belongs to user {STRANGER}"):
        server.password(site)
    file.rename(home / "his")
    file.symlink_to(home / "his")
    with pytest.raises(BadInput, match=f"belongs to user {STRANGER}"):
        server.password(site)


def test_a_server_of_an_earlier_version_that_asks_for_no_password_is_no_server(home: Path) -> None:
    with page_of_a_stranger("everything") as url, holding(home, "server") as beat:
        beat()
        port = url.rpartition(":")[2].strip("/")
        (home / "rlhf.toml").write_text(f"[prefect]\nport = {port}\n")
        with pytest.raises(BadInput, match="asks for no password: `rlhf down`, then `rlhf up`"):
            services.up(load_site({"RLHF_HOME": str(home)}), ["server"])


# ---------------------------------------------------------------------------------------------------------------------
# Modules in the start folder of a program


PLANTED = "import pathlib; pathlib.Path(__file__).with_name('it-ran').touch(); raise SystemExit('planted')"


def ran(folder: Path, command: list[str], planted: str) -> bool:
    """True if a command executes a module that was planted into its start folder."""
    (folder / f"{planted}.py").write_text(PLANTED)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "PYTHON"))}
    environment |= {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=200, check=False)
    return (folder / "it-ran").exists()


def flow_run_command(folder: Path) -> list[str]:
    """Command with which the worker of a site starts a flow run, without its log."""
    site = load_site({"RLHF_HOME": str(folder / "home")})
    (site.home / "logs").mkdir(parents=True)
    return shlex.split(work_pool._job_template(site)["variables"]["properties"]["command"]["default"])


def test_a_planted_module_does_not_run_in_a_flow_run(tmp_path: Path) -> None:
    command = flow_run_command(tmp_path)
    assert not ran(tmp_path, command, "anyio")
    as_it_was = [word.replace(" -P ", " ") for word in command]
    assert as_it_was != command
    assert ran(tmp_path, as_it_was, "anyio"), "negative control: the folder of the runs came first"


def test_a_planted_module_does_not_run_in_a_job(tmp_path: Path) -> None:
    command = list(agent_command(RunDir(tmp_path / "run"), 1, sys.executable))
    assert not ran(tmp_path, command, "argparse")
    assert ran(tmp_path, [word for word in command if word != "-P"], "argparse"), "negative control"


def test_every_module_that_is_started_imports_nothing_from_where_it_begins() -> None:
    """All our commands with `-m` are checked: a new one must also use `-P`, or `-I`, which older interpreters know."""
    found = []
    for path in (path for name in ("flows", "rlhf_core") for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List | ast.Tuple):
                words = [word.value for word in node.elts if isinstance(word, ast.Constant)]
                if "-m" in words and len(node.elts) > 1:
                    found.append((path.relative_to(ROOT), not {"-P", "-I"}.isdisjoint(words)))
    assert len(found) >= 10
    assert [path for path, is_safe in found if not is_safe] == []
    assert server.WORKER_SETTINGS["PYTHONSAFEPATH"] == "1", "for what Prefect itself starts"


# ---------------------------------------------------------------------------------------------------------------------
# Names


@needs_root
def test_the_environment_does_not_change_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "root")
    assert as_stranger(lambda: [user_name(), account(), attributed_here("Head of Safety")]) == [
        "nobody",
        f"nobody, uid {STRANGER}",
        f"Head of Safety (nobody, uid {STRANGER})",
    ]
    monkeypatch.setenv("LOGNAME", "anna")
    assert user_name() == "root"


def test_a_name_from_a_form_is_marked_whatever_it_says() -> None:
    for name in ("Head of Safety", "root (uid 0)", "root, uid 0)"):
        answer = Approval(approve=True, by=name, reason="").as_answer()
        assert answer.by == f"{name} (through Prefect, unverified)"
    assert attributed("anna", "anna, uid 1000") == "anna (uid 1000)"
    assert attributed("anna", "") == "anna", "a record of rlhf-flows 0.1"
    forged = f"Head of Safety (root, uid 0){' ' * 300}"
    assert attributed(forged, "anna, uid 1000").endswith("… (anna, uid 1000)")
    assert len(attributed(forged, "anna, uid 1000")) < LABEL_CHARACTERS, "otherwise the record would cut it off"


@pytest.mark.parametrize("flow_run", ["", "0b5ad1e8-9f6c-4a53-8f0a-000000000000"])
def test_the_requester_of_a_run_is_recorded_everywhere_with_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Rlhf, flow_run: str
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    site = load_site()
    run_dir = prepare(
        make_spec(),
        site.runs_dir,
        config_source="a.toml",
        owner="Head of Safety",
        flow_run_id=flow_run,
        folder=tmp_path,
    )
    behind = THROUGH_PREFECT if flow_run else account()
    shown = f"Head of Safety ({behind})"
    with HistoryStore(site.database_url) as store:
        sync(run_dir, store)
        with store.reading() as connection:
            books = connection.exec_driver_sql("SELECT owner, owner_account FROM runs").one()
            (message,) = connection.exec_driver_sql("SELECT message FROM events").one()
    assert tuple(books) == ("Head of Safety", behind)
    assert message.startswith(f"{shown} requested")
    assert shown in rlhf("show", run_dir.run_id).stdout


def test_a_run_of_an_earlier_version_says_nothing_of_its_user(tmp_path: Path) -> None:
    run_dir = prepare(make_spec(), tmp_path / "runs", config_source="a.toml", folder=tmp_path)
    content = json.loads(run_dir.spec.read_text())
    del content["owner_account"]
    run_dir.spec.write_text(json.dumps(content))
    assert run_dir.read_spec().owner_account == ""


@needs_root
def test_an_approval_at_the_command_line_names_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is recorded under the operating system's user, next to the name that the user claims."""
    monkeypatch.setenv("LOGNAME", "head-of-safety")
    given: list[str] = []
    monkeypatch.setattr("rlhf_core.cli.commands.promote.find_run", lambda *_: run_dir)

    def answers(
        _run_dir: object, _site: object, _store: object, _verdict: str, by: str, *_: object, **__: object
    ) -> Any:
        given.append(by)
        return Answered(PromotionState.REFUSED, "refused")

    monkeypatch.setattr("rlhf_core.control.approval.answer_promotion", answers)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    run_dir = RunDir(tmp_path / "run")
    assert execute(["refuse", "run", "--by", "Head of Safety", "--reason", "no"]) == 0
    assert execute(["approve", "run"]) == 0
    assert given == ["Head of Safety (root, uid 0)", "root (uid 0)"]


# ---------------------------------------------------------------------------------------------------------------------
# The guards by themselves: accepted and refused requests


Answer = tuple[int, int]
"""Status, and number of bytes that the guarded application read."""


def answered(guard: Any, *, method: str = "POST", kind: str = "http", body: int = 0, **headers: str) -> Answer:
    """Answer to a request with this many bytes of body."""
    read, status = 0, 0

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal read
        more = True
        while more:
            message = await receive()
            read += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    left = body

    async def receive() -> Message:
        nonlocal left
        piece = min(left, 1000)
        left -= piece
        return {"type": "http.request", "body": b" " * piece, "more_body": left > 0}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "websocket.close":
            status = message["code"]

    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": kind, "method": method, "path": "/", "headers": raw}
    asyncio.run(guard(application)(scope, receive, send))
    return status, read


@pytest.mark.parametrize("length", [None, "0", "-1", "99999999999999999999"])
def test_a_body_is_counted_whatever_its_sender_says(length: str | None) -> None:
    headers = {} if length is None else {"content_length": length}
    status, read = answered(lambda app: Limited(app, 10_000), body=50_000, **headers)
    assert status == 413
    assert read <= 10_000
    assert answered(lambda app: app, body=50_000) == (200, 50_000), "negative control"
    assert answered(lambda app: Limited(app, 10_000), body=10_000) == (200, 10_000)


@pytest.mark.parametrize(
    "given",
    [
        *("", "Basic", "Basic ", "Basic !!!", "Basic w6QK", "Bearer cmxoZjpzZWNyZXQ=", "Basic cmxoZjpzZWNyZXQ"),
        *("Basic cmxoZjpzZWNyZXQ=, Basic cmxoZjpzZWNyZXQ=", "Basic cmxoZjpzZWNyZXQh", "\xff"),
    ],
)
def test_a_body_is_read_for_the_password_alone(given: str) -> None:
    def guard(app: Any) -> Authenticated:
        return Authenticated(app, "rlhf:secret")

    assert answered(guard, body=5000, authorization=given) == (401, 0)
    assert answered(guard, body=5000, authorization="Basic cmxoZjpzZWNyZXQ=") == (200, 5000), "negative control"


PUBLIC = names_of(["runs.example.com", "login1"], ["https://runs.example.com"], any_address=True)


@pytest.mark.parametrize(
    ("names", "host", "origin", "status"),
    [
        (names_of(()), "localhost:4200", "http://localhost:4200", 200),
        (names_of(()), "localhost:4200", "https://localhost:4200", 200),
        (names_of(()), "localhost:4200", "http://localhost:4201", 403),
        (names_of(()), "localhost", "http://localhost", 200),
        (names_of(()), "localhost", "http://localhost:99999", 403),
        (names_of(()), "localhost", "file://localhost", 403),
        (names_of(()), "10.0.0.7", "", 400),
        (names_of(()), "localhost.evil.example", "", 400),
        (names_of(()), "[::1", "", 200),
        (PUBLIC, "10.0.0.7:4200", "http://10.0.0.7:4200", 200),
        (PUBLIC, "[fd00::7]:4200", "http://[fd00::7]:4200", 200),
        (PUBLIC, "login1:4200", "https://runs.example.com", 200),
        (PUBLIC, "login1:4200", "https://runs.example.com.evil.example", 403),
        (PUBLIC, "login1:4200", "http://runs.example.com", 403),
        (PUBLIC, "RUNS.example.com.", "", 200),
        (PUBLIC, "evil.example", "", 400),
        (PUBLIC, "10.0.0.7.evil.example", "", 400),
        (PUBLIC, "runs.example.com, evil.example", "", 400),
    ],
)
def test_hosts_and_origins(names: Names, host: str, origin: str, status: int) -> None:
    headers: dict[str, Any] = {"host": host, **({"origin": origin} if origin else {})}
    assert answered(lambda app: Known(app, names), **headers)[0] == status
    assert answered(lambda app: Known(app, names), method="GET", **headers)[0] == (400 if status == 400 else 200)
    if status != 200:
        assert answered(lambda app: Known(app, names), kind="websocket", **headers)[0] == 1008


def test_a_site_knows_its_own_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def names(**settings: Any) -> Names:
        site = load_site({"RLHF_HOME": str(tmp_path)})
        return server.own_names(replace(site, prefect=site.prefect.model_copy(update=settings)))

    monkeypatch.setattr(server.socket, "gethostname", lambda: "Login1")
    monkeypatch.setattr(server.socket, "getfqdn", lambda: "login1.example.com")
    assert not names().serves("login1"), "on loopback it has another name"
    assert all(
        names(host="0.0.0.0").serves(name) for name in ("login1:4200", "login1.example.com", "10.1.2.3", "[::1]")
    )
    assert names(url="https://runs.example.com/").trusts("https://runs.example.com", "127.0.0.1:4200")
    assert names(hosts=("alias",)).serves("alias:80")
    monkeypatch.setenv("PREFECT_API_URL", "http://server:4200/api")
    assert names(host="0.0.0.0").serves("server:4200"), "the name by which its own programs know it (containers)"
