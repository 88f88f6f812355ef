"""``rlhf reconcile`` in a terminal: it asks the Prefect server of its site."""

from history_tools import orphaned_run
from sites import Site

from flows.queries import RUN_FLOW
from rlhf_core.config.site import load_site
from rlhf_core.run_dir.run import RunDir


def orphan(site: Site) -> RunDir:
    """A run whose controller is dead, with a flow run that is about to continue it."""
    from prefect import flow
    from prefect.states import Scheduled

    from flows.server.clients import api_client

    run_dir = orphaned_run(load_site({"RLHF_HOME": str(site.home)}))
    with api_client() as client:
        client.create_flow_run(flow(lambda: None, name=RUN_FLOW), name=run_dir.run_id, state=Scheduled())
    return run_dir


def test_it_asks_the_server_of_the_site(server: Site) -> None:
    """Before, it asked none without PREFECT_API_URL in its environment: it took over runs that Prefect was about to
    continue, and said that Prefect agreed."""
    run_dir = orphan(server)
    found = server.rlhf("reconcile", "--dry-run", "--json").json()
    assert [one["action"] for one in found if one["run_id"] == run_dir.run_id] == []
    server.ask(f"/flow_runs/{server.flow_run(run_dir)}", method="DELETE")
    found = server.rlhf("reconcile", "--dry-run", "--json").json()
    assert [one["action"] for one in found if one["run_id"] == run_dir.run_id] == ["adopt"], "negative control"
