"""The server that test files share: if it is lost, the next test has one again, and the summary says what was lost."""

import signal

import pytest
from sites import LostServer, Site

from flows.server.settings import server_answers


def test_a_server_that_does_not_respond_or_has_ended_is_reported_and_started_again(
    real_prefect: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real_prefect.in_use():
        assert server_answers()
        (server,) = [one for one in real_prefect.processes() if "serve server" in " ".join(one.cmdline())]
    server.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("sites.SILENT_S", 1.0)
        patch.setattr(real_prefect, "serve", lambda name: None)  # the next start is for both
        with pytest.warns(LostServer, match=r"does not respond:\nstopped[\s\S]*uvicorn"):
            real_prefect.require_server()
    assert not server.is_running()
    with pytest.warns(LostServer, match="has ended"), real_prefect.in_use():
        assert server_answers()
