"""A Prefect server database that is copied for each site: migrated, with Prefect's own block types and nothing else.

To make these takes longer than all else that a new server does at its first start.
"""

import fcntl
import functools
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

REGISTERED = {"PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
"""Environment of a server whose database is a copy: it need not register the block types again."""

_MAKE = """
import asyncio
from rlhf_core.garbage import collect_rarely
collect_rarely()
from prefect.server.database import provide_database_interface
from prefect.server.models.block_registration import run_block_auto_registration

async def make():
    database = provide_database_interface()
    await database.create_db()
    async with await database.session() as session:
        await run_block_auto_registration(session=session)

asyncio.run(make())
"""

_shared_folder: Path | None = None


def share_in(folder: Path) -> None:
    """Make the database once for all test processes of a session, in a folder that they share."""
    global _shared_folder
    _shared_folder = folder


def give_prefect_database(folder: Path) -> None:
    """Put a copy at the place where the server of a site expects its database; an existing one is kept."""
    file = folder / "prefect.db"
    if not file.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy(_template(), file)
        file.chmod(0o600)


@functools.cache
def _template() -> Path:
    """Path of the template, made by the first process of this session that needs it; the others wait."""
    folder = (_shared_folder or Path(tempfile.mkdtemp(prefix="rlhf-prefect-"))) / "prefect-template"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / "prefect.db"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _make(folder / "made", file)
    return file


def _make(home: Path, file: Path) -> None:
    environment = {**os.environ, "PREFECT_HOME": str(home)}
    subprocess.run([sys.executable, "-P", "-c", _MAKE], env=environment, check=True, timeout=300)
    draft = file.with_suffix(".draft")
    # Data that is still in the write-ahead log is copied too.
    with closing(sqlite3.connect(home / "prefect.db")) as source, closing(sqlite3.connect(draft)) as copy:
        source.backup(copy)
    draft.rename(file)
