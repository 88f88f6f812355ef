"""Attackers of the server and the folders of a site: another user of the machine, and a page from another origin."""

import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_stand_in import QuietHandler, serving

STRANGER = 65534
"""The user ``nobody``."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="another user's attack needs root")


def as_stranger(attack: Callable[[], Any]) -> Any:
    """Result of an attack in a process of another user: its JSON, or the class name of the exception."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os.write(writer, json.dumps(_tried(attack)).encode())
        except Exception:  # noqa: BLE001 - this process is a copy of the whole of pytest: it must not go on as that
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def _tried(attack: Callable[[], Any]) -> Any:
    try:
        return attack()
    except OSError as error:
        return type(error).__name__


@contextmanager
def page_of_a_stranger(html: str) -> Iterator[str]:
    """A web page on another port of this machine, as any of its users can serve one; yields its address."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

    with serving(Handler) as port:
        yield f"http://127.0.0.1:{port}/"
