"""Stand-in for an NFS client with an unexpired directory cache: a name that was not found stays missing.

The Linux client caches that a folder has no such name (nfs(5), "Directory entry caching"). It drops this entry when the
folder is opened, because it then asks the server whether the folder has changed. It also knows every name that it
creates itself. Changes by other nodes are invisible to it: :meth:`NfsClient.elsewhere`.
"""

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

READS = ("stat", "open", "scandir", "listdir")
CREATES = ("mkdir", "rename", "replace", "link")


class NfsClient:
    """Directory cache of one node for a folder that it shares with others."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._missing: set[Path] = set()
        self._is_elsewhere = False
        self.num_opened_folders = 0
        """Requests to the server, whatever the client remembers."""

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Run the block as another node."""
        self._is_elsewhere = True
        try:
            yield
        finally:
            self._is_elsewhere = False

    def reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function whose first argument is a path to look up, so that this client executes it."""
        lists = function in (os.scandir, os.listdir)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if self._is_elsewhere or isinstance(path, int) or not Path(path).is_relative_to(self._root):
                return function(path, *arguments, **options)
            where, how = Path(path), arguments[0] if arguments else ""
            flags = how if isinstance(how, int) else 0
            if flags & os.O_CREAT or set("wax") & set(str(how)):
                self._missing.discard(where)
            if self._missing & {where, *where.parents}:
                raise FileNotFoundError(errno.ENOENT, "remembered to be missing", str(where))
            try:
                found = function(path, *arguments, **options)
            except FileNotFoundError:
                self._remember(where)
                raise
            if lists or flags & os.O_DIRECTORY:
                self.num_opened_folders += 1
                self._missing = {one for one in self._missing if one.parent != where}
            return found

        return call

    def creating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function whose last positional argument is a path to create, so that this client executes it."""

        def call(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            if not self._is_elsewhere:
                self._missing -= {Path(one) for one in arguments if not isinstance(one, int)}
            return found

        return call

    def _remember(self, path: Path) -> None:
        """Remember the topmost missing name, because nothing below it is ever looked up."""
        if not os.path.lexists(path):
            self._missing.add([one for one in (path, *path.parents) if not os.path.lexists(one)][-1])


@pytest.fixture
def nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NfsClient:
    """This process as an NFS client for everything below ``tmp_path``."""
    client = NfsClient(tmp_path)
    opens = client.reading(io.open)
    for name in READS:
        monkeypatch.setattr(os, name, client.reading(getattr(os, name)))
    for name in CREATES:
        monkeypatch.setattr(os, name, client.creating(getattr(os, name)))
    monkeypatch.setattr(io, "open", opens)
    return client
