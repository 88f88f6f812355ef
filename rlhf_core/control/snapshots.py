"""Snapshots of deployed configs: what is scheduled does not change when the user edits the config or the code.

``<home>/deployments/<name>/<hash>/`` contains the config with absolute paths, the user's code at that time, and their
origin. The hash is that of their content: a snapshot is never changed, and equal ones are stored once. The modification
time of the folder is when it was last requested; the daemon removes unreferenced snapshots some days after that.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tomli_w

from rlhf_core.errors import BadInput
from rlhf_core.files.whole import read_model, remove_tree, write_model, write_text
from rlhf_core.launch.config_paths import load_spec
from rlhf_core.launch.prepare import git_revision, keep_code
from rlhf_core.schemas.base import Schema

CONFIG = "config.toml"
ORIGIN = "origin.json"
CODE = "code"


class Origin(Schema):
    """Origin of a snapshot."""

    source: str
    """The config file, or the name of a preset."""
    overrides: tuple[str, ...] = ()
    """Overrides given at the deployment."""
    folder: str
    """Folder from which it was deployed; relative paths are resolved against it."""
    revision: str = ""
    """Git revision of that folder; empty outside a repository."""


@dataclass(frozen=True)
class Kept:
    """A snapshot of a config."""

    config: Path
    """The TOML file."""
    code: Path
    """Folder with the user's code."""
    folder: Path
    """Base folder of relative paths."""
    revision: str
    """Git revision of the code."""


def keep(
    source: str, overrides: Sequence[str], name: str, home: Path, folder: Path, *, further: Sequence[str] = ()
) -> Kept:
    """Make a snapshot of a config, with its overrides applied, and of the user's code that it needs.

    Args:
        source: a config file, or the name of a preset.
        overrides: each ``section.field=value``.
        name: name of the deployment.
        home: folder of this user (``RLHF_HOME``).
        folder: base of relative paths, in which reward modules are also searched for.
        further: overrides of one run, which are not applied here; the code that they name is copied as well.

    Raises:
        BadConfig: the config cannot be used.
        BadInput: the folder cannot be written.
    """
    place = _place(home) / name
    unfinished = place / f".new-{os.getpid()}-{secrets.token_hex(4)}"
    spec = load_spec(source, overrides, folder, refuse_misplaced=not further)
    changed = load_spec(source, [*overrides, *further], folder, refuse_misplaced=True) if further else spec
    revision = git_revision(folder)
    try:
        keep_code(unfinished / CODE, changed, folder, revision)
        snapshot = unfinished / CODE / "snapshot"
        digest = _digest(snapshot, spec.model_dump_json())
        kept = place / digest
        # A later run uses the copies; their folder already has its final name.
        paths = tuple(str(kept / CODE / "snapshot" / Path(path).name) for path in spec.code.paths)
        kept_spec = spec.model_copy(update={"code": spec.code.model_copy(update={"paths": paths})})
        write_text(
            unfinished / CONFIG, tomli_w.dumps(kept_spec.model_dump(mode="json", exclude_unset=True, exclude_none=True))
        )
        origin = Origin(source=source, overrides=tuple(overrides), folder=str(folder), revision=revision)
        write_model(unfinished / ORIGIN, origin)
        _settle(unfinished, kept)
    except OSError as error:
        raise BadInput(
            f"cannot keep the config in {place}: {error.strerror}. Set RLHF_HOME to a writable folder"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Kept(kept / CONFIG, kept / CODE / "snapshot", folder, revision)


def _settle(unfinished: Path, kept: Path) -> None:
    """Give a finished snapshot its final name, unless the same snapshot exists already."""
    if kept.exists() and not (kept / CONFIG).is_file():
        remove_tree(kept)  # unusable, and would stay unusable
    try:
        unfinished.rename(kept)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        os.utime(kept)  # requested again, so it no longer counts as old


def kept_with(source: str) -> Kept | None:
    """The snapshot that a config belongs to; None for a config file of the user, or a preset."""
    path = Path(source)
    origin = read_model(path.with_name(ORIGIN), Origin) if path.name == CONFIG else None
    if origin is None:
        return None
    return Kept(path, path.parent / CODE / "snapshot", Path(origin.folder), origin.revision)


def _place(home: Path) -> Path:
    return home / "deployments"


def _digest(folder: Path, text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=6)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Unreferenced snapshots


@dataclass(frozen=True)
class Copy:
    """A snapshot as found on disk."""

    folder: Path
    requested_at: datetime
    """Time at which it was last deployed or submitted."""

    @property
    def key(self) -> tuple[str, str]:
        """Deployment and hash, which do not depend on the path through which the home folder is reached."""
        return self.folder.parent.name, self.folder.name


def copies(home: Path) -> list[Copy]:
    """All snapshots in a home folder, including the leftovers of a killed removal or a killed deployment."""
    return [
        Copy(path, datetime.fromtimestamp(path.stat().st_mtime, UTC))
        for path in sorted(_place(home).glob("*/*"))
        if re.fullmatch(_COPY, path.name) and not path.is_symlink() and path.is_dir()
    ]


_COPY = r"([0-9a-f]{12}|\.new-[0-9]+-[0-9a-f]{8})(\.old)?"


def key_of(source: str) -> tuple[str, str] | None:
    """Deployment and hash of the snapshot that a config's path leads to; None for any other path, or a preset."""
    path = Path(source)
    return (path.parents[1].name, path.parent.name) if path.name == CONFIG and len(path.parts) > 2 else None


def removable(found: Iterable[Copy], referred: Collection[tuple[str, str]], *, days: int, now: datetime) -> list[Copy]:
    """The snapshots that may be removed: old enough, and not referred to. Pure.

    Args:
        referred: keys of the snapshots that something refers to.
        days: time to keep each one after it was last requested; 0 keeps all.
        now: the current time.
    """
    if not days:
        return []
    latest = now - timedelta(days=days)
    return [one for one in found if one.requested_at < latest and one.key not in referred]


def remove(copy: Copy) -> bool:
    """Remove a snapshot. Returns False if it was requested again in the meantime.

    Raises:
        OSError: it cannot be removed.
    """
    aside = copy.folder if copy.folder.suffix else copy.folder.with_suffix(".old")
    if aside != copy.folder:
        copy.folder.rename(aside)
        if datetime.fromtimestamp(aside.stat().st_mtime, UTC) > copy.requested_at:
            aside.rename(copy.folder)
            return False
    remove_tree(aside)
    return True
