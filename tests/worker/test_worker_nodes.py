"""The node of an agent, determined from the environment; contradictions are reported."""

import pytest

from rlhf_core.worker.nodes.membership import Nodes, NodesError, interface_of

THREE = "a=10.0.0.1,b=10.0.0.2,c=10.0.0.3"


def test_without_a_node_list_there_is_one_node() -> None:
    nodes = Nodes.of({"SLURMD_NODENAME": "n7"})
    assert (nodes.name, nodes.num, nodes.is_first, nodes.address) == ("n7", 1, True, "127.0.0.1")


def test_every_node_finds_itself_and_agent_0() -> None:
    nodes = Nodes.of({"RLHF_NODES": THREE, "SLURM_NODEID": "2", "SLURMD_NODENAME": "c"})
    assert (nodes.name, nodes.num, nodes.is_first) == ("c", 3, False)
    assert (nodes.address, nodes.addresses[0]) == ("10.0.0.3", "10.0.0.1")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_NODEID": "1"}, "no RLHF_NODES"),
        ({"SLURM_NODEID": "x"}, "expected a number"),
        ({"RLHF_NODES": "a,b"}, "expected name=address"),
        ({"RLHF_NODES": "a=1,a=2"}, "a duplicate name"),
        ({"RLHF_NODES": THREE, "SLURM_NODEID": "3"}, "names 3 nodes"),
        ({"RLHF_NODES": THREE, "SLURM_NODEID": "1", "SLURMD_NODENAME": "c"}, "node 1 is b"),
    ],
)
def test_a_contradiction_is_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(NodesError, match=words):
        Nodes.of(environment)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("no.such.name.invalid") == ""


@pytest.mark.parametrize(
    ("addresses", "listens_at"),
    [
        (("127.0.0.1", "127.0.0.1"), "127.0.0.1"),
        (("192.0.2.1", "192.0.2.2"), ""),  # RFC 5737: on no interface
        (("no.such.name.invalid", "192.0.2.2"), ""),
        (("127.0.0.1", "192.0.2.2"), ""),  # a hosts file that gives the node its loopback address
    ],
)
def test_a_store_listens_on_an_address_that_the_other_nodes_reach(addresses: tuple[str, ...], listens_at: str) -> None:
    assert Nodes(("a", "b"), addresses, 0).listening_address == listens_at
