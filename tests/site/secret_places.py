"""Places in which a secret could appear: processes of a job, files, database tables."""

from pathlib import Path

import psutil
import psycopg

from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.resources import JOB_VARIABLE


def environments(run_dir: RunDir) -> list[str]:
    """Environment variables of every process of a run's job, as text."""
    found = []
    for process in psutil.process_iter():
        try:
            around = process.environ()
        except psutil.Error:
            continue
        if around.get(JOB_VARIABLE, "").startswith(run_dir.run_id) or run_dir.run_id in around.get(
            "SLURM_JOB_NAME", ""
        ):
            found.append("\n".join(f"{name}={value}" for name, value in around.items()))
    return found


def files_with(secret: str, folder: Path) -> list[Path]:
    """Files that contain the secret."""
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def tables_with(secret: str, database: str) -> list[str]:
    """Tables of a PostgreSQL database with a row that contains the secret."""
    plain = database.replace("+psycopg", "").replace("+asyncpg", "")
    with psycopg.connect(plain) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        return [
            name
            for (name,) in tables
            if connection.execute(
                f'SELECT 1 FROM "{name}" AS one WHERE one::text LIKE %s LIMIT 1', (f"%{secret}%",)
            ).fetchone()
        ]
