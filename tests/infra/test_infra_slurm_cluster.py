"""The throw-away Slurm: its start, its separation from other clusters, and its removal without a trace."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slurm_cluster import needs_slurm, throwaway

SLURM = Path(__file__).parents[2] / "infra" / "slurm"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[throwaway.Cluster]:
    """A cluster that ends without a trace."""
    with throwaway.Cluster(tmp_path_factory.mktemp("slurm"), nodes=3, gpus=2).running() as cluster:
        yield cluster
    assert daemons(cluster.folder) == []


def daemons(folder: Path) -> list[int]:
    """Daemons whose command line or configuration contains the folder."""
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in ("slurmctld", "slurmd", "munged"):
            try:
                if str(folder) in " ".join([*process.cmdline(), process.environ().get("SLURM_CONF", "")]):
                    found.append(process.pid)
            except psutil.Error:
                continue
    return found


@needs_slurm
def test_jobs_run_on_all_nodes_with_gpus(cluster: throwaway.Cluster) -> None:
    output = cluster.command(
        "srun", "-N3", "--gpus-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    )
    assert sorted(output.splitlines()) == ["node1 0,1", "node2 0,1", "node3 0,1"]
    assert len(daemons(cluster.folder)) == 5


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_another_user_has_made_is_refused(
    tmp_path: Path, is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in it, such as ``etc`` to ``/etc``, would have root overwrite ``/etc/hosts``."""
    taken = tmp_path / "slurm"
    if is_link:
        taken.symlink_to(tmp_path)
    else:
        taken.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(throwaway.ClusterError, match=f"of user {os.getuid()}, expected a folder of user"):
        throwaway.Cluster(taken)


def test_a_folder_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(throwaway.ClusterError, match="every user may write"):
        throwaway.Cluster(tmp_path)
    tmp_path.chmod(0o700)


def sleeping_job(cluster: throwaway.Cluster) -> str:
    """Id of a new job that outlives its test."""
    return cluster.command("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600")


def jobs(cluster: throwaway.Cluster) -> list[str]:
    return cluster.command("squeue", "--noheader", "--format=%i").split()


@needs_slurm
def test_a_cluster_that_is_up_is_left_alone(cluster: throwaway.Cluster) -> None:
    known, job = daemons(cluster.folder), sleeping_job(cluster)
    with pytest.raises(throwaway.ClusterError, match="already runs"):
        throwaway.Cluster(cluster.folder, nodes=1).up()
    again = subprocess.run([SLURM / "cluster.py", "up", cluster.folder], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == f"export SLURM_CONF={cluster.conf}", "a second terminal can use it"
    assert "already runs" in again.stderr
    assert daemons(cluster.folder) == known
    assert job in jobs(cluster)


@needs_slurm
def test_two_clusters_live_side_by_side(cluster: throwaway.Cluster, tmp_path: Path) -> None:
    with throwaway.Cluster(tmp_path, nodes=1).running() as other:
        job = sleeping_job(cluster)
        assert job in jobs(cluster)
        assert jobs(other) == []
    assert daemons(tmp_path) == []
    assert job in jobs(cluster)
    assert cluster.command("srun", "echo", "still here") == "still here"


@needs_slurm
def test_a_job_outlives_its_controller_and_another_process_finds_the_cluster(cluster: throwaway.Cluster) -> None:
    found_again = throwaway.Cluster(cluster.folder)
    job = sleeping_job(found_again)
    found_again.stop("slurmctld")
    assert found_again.pid("slurmctld") is None
    assert "DOWN" in found_again.command("scontrol", "ping", check=False)
    found_again.start("slurmctld")
    assert job in jobs(found_again)


@needs_slurm
def test_a_process_with_the_reused_id_of_a_dead_daemon_is_not_killed(tmp_path: Path) -> None:
    cluster = throwaway.Cluster(tmp_path, nodes=1)
    (tmp_path / "run").mkdir()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (tmp_path / "run" / "slurmctld.pid").write_text(f"{stranger.pid} 1")
        cluster.stop("slurmctld")
        assert stranger.poll() is None
        stranger.kill()
    # Negative control: with its own start time it is taken for the daemon and killed.
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (tmp_path / "run" / "slurmctld.pid").write_text(f"{stranger.pid} {throwaway._born(stranger.pid)}")
        cluster.stop("slurmctld")
        assert stranger.poll() is not None


@needs_slurm
def test_a_daemon_that_ends_at_once_is_named_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throwaway, "CONFIG", throwaway.CONFIG + "NoSuchSetting=1\n")
    with pytest.raises(throwaway.ClusterError, match=r"slurmctld ended at once; it said: .*configuration"):
        throwaway.Cluster(tmp_path, nodes=1).up()
    assert daemons(tmp_path) == []


def test_a_folder_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(throwaway.ClusterError, match="choose a shorter path"):
        throwaway.Cluster(tmp_path / ("x" * 100))


def test_missing_programs_are_named_with_their_packages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SLURM / "cluster.py", "up", tmp_path],
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    if Path("/usr/sbin/slurmctld").exists():
        assert "missing: scontrol" in done.stderr
    assert done.returncode == 1
    assert "install slurmctld, slurmd, slurm-client and munge" in done.stderr
