"""The throw-away Slurm: its start, its separation from other clusters, and its removal without a trace."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from slurm_cluster import WHY_NOT, throwaway

SLURM = Path(__file__).parents[2] / "infra" / "slurm"
needs_slurm = pytest.mark.skipif(bool(throwaway.missing_programs()), reason=WHY_NOT)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slurm")


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
def test_jobs_run_on_all_nodes_with_gpus_and_nothing_is_left(folder: Path) -> None:
    cluster = throwaway.Cluster(folder, nodes=3, gpus=2)
    cluster.up()
    try:
        output = cluster.command(
            "srun", "-N3", "--gpus-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
        )
        assert sorted(output.splitlines()) == ["node1 0,1", "node2 0,1", "node3 0,1"]
        assert len(daemons(folder)) == 5
    finally:
        cluster.down()
    assert daemons(folder) == []


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_another_user_has_made_is_refused(
    folder: Path, is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in it, such as ``etc`` to ``/etc``, would have root overwrite ``/etc/hosts``."""
    taken = folder / "slurm"
    if is_link:
        taken.symlink_to(folder)
    else:
        taken.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(throwaway.ClusterError, match=f"of user {os.getuid()}, expected a folder of user"):
        throwaway.Cluster(taken)


def test_a_folder_that_every_user_may_write_to_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(throwaway.ClusterError, match="every user may write"):
        throwaway.Cluster(folder)
    folder.chmod(0o700)


@needs_slurm
def test_a_cluster_that_is_up_is_left_alone(folder: Path) -> None:
    cluster = throwaway.Cluster(folder, nodes=1)
    cluster.up()
    try:
        known = daemons(folder)
        job = cluster.command("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 60")
        with pytest.raises(throwaway.ClusterError, match="already runs"):
            throwaway.Cluster(folder, nodes=1).up()
        again = subprocess.run([SLURM / "cluster.py", "up", folder], capture_output=True, text=True, check=True)
        assert again.stdout.strip() == f"export SLURM_CONF={cluster.conf}", "a second terminal can use it"
        assert "already runs" in again.stderr
        assert daemons(folder) == known
        assert cluster.command("squeue", "--noheader", "--format=%i") == job
    finally:
        cluster.down()


@needs_slurm
def test_two_clusters_live_side_by_side(folder: Path) -> None:
    one, other = throwaway.Cluster(folder / "a", nodes=1), throwaway.Cluster(folder / "b", nodes=1)
    try:
        one.up()
        other.up()
        job = one.command("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 60")
        assert one.command("squeue", "--noheader", "--format=%i") == job
        assert other.command("squeue", "--noheader", "--format=%i") == ""
        one.down()
        assert other.command("srun", "echo", "still here") == "still here"
    finally:
        one.down()
        other.down()


@needs_slurm
def test_a_job_outlives_its_controller_and_another_process_finds_the_cluster(folder: Path) -> None:
    throwaway.Cluster(folder, nodes=1).up()
    found_again = throwaway.Cluster(folder, nodes=1)
    try:
        job = found_again.command("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 60")
        found_again.stop("slurmctld")
        assert found_again.pid("slurmctld") is None
        assert "DOWN" in found_again.command("scontrol", "ping", check=False)
        found_again.start("slurmctld")
        assert found_again.command("squeue", "--noheader", "--format=%i %T").split()[0] == job
    finally:
        found_again.down()
    assert daemons(folder) == []


@needs_slurm
def test_a_process_with_the_reused_id_of_a_dead_daemon_is_not_killed(folder: Path) -> None:
    cluster = throwaway.Cluster(folder, nodes=1)
    (folder / "run").mkdir()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (folder / "run" / "slurmctld.pid").write_text(f"{stranger.pid} 1")
        cluster.stop("slurmctld")
        assert stranger.poll() is None
        stranger.kill()
    # Negative control: with its own start time it is taken for the daemon and killed.
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (folder / "run" / "slurmctld.pid").write_text(f"{stranger.pid} {throwaway._born(stranger.pid)}")
        cluster.stop("slurmctld")
        assert stranger.poll() is not None


@needs_slurm
def test_a_daemon_that_ends_at_once_is_named_with_its_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throwaway, "CONFIG", throwaway.CONFIG + "NoSuchSetting=1\n")
    with pytest.raises(throwaway.ClusterError, match=r"slurmctld ended at once; it said: .*configuration"):
        throwaway.Cluster(folder, nodes=1).up()
    assert daemons(folder) == []


def test_a_folder_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(throwaway.ClusterError, match="choose a shorter path"):
        throwaway.Cluster(tmp_path / ("x" * 100))


def test_missing_programs_are_named_with_their_packages(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, SLURM / "cluster.py", "up", folder],
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    if Path("/usr/sbin/slurmctld").exists():
        assert "missing: scontrol" in done.stderr
    assert done.returncode == 1
    assert "install slurmctld, slurmd, slurm-client and munge" in done.stderr
