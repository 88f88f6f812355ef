"""The server that test files share: if it is lost, one test fails with the reason, and the others have one again."""

import pytest
from sites import Site

from flows.server.settings import server_answers


def test_a_lost_server_is_reported_and_started_again(real_prefect: Site) -> None:
    with real_prefect.in_use():
        assert server_answers()
    real_prefect.kill("server")
    with pytest.raises(pytest.fail.Exception, match="The server of"), real_prefect.in_use():
        pytest.fail("there is no server")
    with real_prefect.in_use():
        assert server_answers()
