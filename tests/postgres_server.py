"""A throw-away PostgreSQL server, in a temporary folder and on a port of its own."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from process_tools import free_port

from rlhf_core.machine.parent_death import die_with_parent


class PostgresServer:
    """A running PostgreSQL server that can be stopped and started again.

    Raises:
        LookupError: the server programs are not installed or cannot start; the message says so.
    """

    def __init__(self) -> None:
        self._programs = postgres_programs()
        self.folder = Path(tempfile.mkdtemp(prefix="rlhf-postgres-"))
        """A folder that the server may write to."""
        self._identity: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            owner = pwd.getpwnam("nobody")
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
            self._identity = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        self._data = self.folder / "data"
        settings = ("-U", "rlhf", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        made = subprocess.run(
            (self._programs / "initdb", "-D", self._data, *settings),
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
            **self._identity,
        )
        if made.returncode != 0:
            raise LookupError(f"PostgreSQL cannot be started here: {made.stderr.strip().splitlines()[-1]}")
        self.port = free_port()
        while not self._starts():
            self.port = free_port()

    def url(self, database: str = "postgres") -> str:
        """Address of a database of the server, in the form of ``RLHF_DATABASE_URL``."""
        return f"postgresql://rlhf@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the stopped server again, on the same port."""
        if not self._starts():
            raise RuntimeError(f"another process has taken port {self.port}")

    def _starts(self) -> bool:
        """Start the server; False if another process has taken its port in the meantime."""
        import psycopg

        settings = ("listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}", "fsync=off")
        command = [str(self._programs / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        messages = self.folder / "log"
        with messages.open("wb") as log:
            self._process = subprocess.Popen(
                command + [word for setting in settings for word in ("-c", setting)],
                cwd=self.folder,
                stdout=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=partial(die_with_parent, signal.SIGINT),
                **self._identity,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                with psycopg.connect(self.url(), connect_timeout=5) as connection:
                    answer = connection.execute("SHOW data_directory").fetchone()
                return answer == (str(self._data),)  # otherwise it is the server of another test process
            except psycopg.OperationalError:
                if self._process.poll() is not None and "Address already in use" in messages.read_text():
                    return False
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server, without waiting for its clients."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(30)

    def remove(self) -> None:
        """Stop the server and remove its files."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def postgres_programs() -> Path:
    """Folder of the server programs.

    Raises:
        LookupError: they or the driver are not installed.
    """
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    found = shutil.which("postgres")
    folders += [Path(found).parent] if found else []
    if not folders or not (folders[-1] / "initdb").exists():
        raise LookupError("needs the PostgreSQL server programs (Debian: apt-get install postgresql)")
    try:
        import psycopg  # noqa: F401 - only whether it is there
    except ImportError:
        raise LookupError("needs the PostgreSQL driver (pip install '.[postgres]')") from None
    return folders[-1]
