"""Clients of the Prefect API: the server stores a token for each client that asks for one, so they share theirs."""

import sqlite3
from contextlib import closing

import pytest
from sites import Site

from flows.server import clients
from flows.server.clients import api_client


def tokens(server: Site, change: str = "") -> int:
    """Number of tokens in the server's database, after a change of it."""
    with closing(sqlite3.connect(server.home / "prefect" / "prefect.db", timeout=60)) as database, database:
        if change:
            database.execute(change)
        return int(database.execute("SELECT count(*) FROM csrf_token").fetchone()[0])


def write() -> None:
    """Send a request that needs a token."""
    with api_client() as client:
        client.create_flow_from_name("of-the-clients")


def test_the_clients_of_a_process_share_a_token(server: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_latest", {})
    before = tokens(server)
    write()
    write()
    assert tokens(server) == before + 1
    assert tokens(server, "DELETE FROM csrf_token") == 0
    write()
    write()
    assert tokens(server) == 1, "in place of one that the server does not know any more"
    monkeypatch.setattr(clients, "_take_token", lambda client: None)
    write()
    write()
    assert tokens(server) == 3, "negative control"
