#!/usr/bin/env python3
"""A throw-away Slurm cluster in one folder: real munged, slurmctld and one slurmd per node, all on this machine.

    cluster.py up FOLDER [--nodes 4] [--cpus 8] [--gpus 2] [--namespaces]     prints `export SLURM_CONF=...`
    cluster.py up FOLDER        for one that is running: leaves it as it is, and prints the same
    cluster.py down FOLDER

and, while it runs, commands that disturb one node or end the disturbance:

    cluster.py slow-link FOLDER NODE RATE_MBIT [--latency-ms 5]     cluster.py mend-link FOLDER NODE
    cluster.py cut-link FOLDER NODE                                 mend-link ends it
    cluster.py slow-cpu FOLDER NODE CORES                           cluster.py mend-cpu FOLDER NODE
    cluster.py variables FOLDER NODE [NAME=VALUE ...] [NAME ...]    a bare NAME is unset; no variables end it
    cluster.py clock FOLDER NODE OFFSET_S                           0 ends it

Nothing is written outside the folder, nothing listens on a port that another cluster uses, and every daemon is ended by
its process id, so that several clusters can run side by side and next to a real one. Needs the packages slurmctld,
slurmd, slurm-client and munge, and only Python's standard library.

With --namespaces, which requires root, every node has its own network, address, host name and control group; `down`
removes them. Only then can the links and processors of nodes be slowed down.

The cluster has two partitions over all nodes: ``main``, and ``first``, whose jobs preempt those of ``main`` (with a
grace period of some seconds, which Slurm announces with SIGTERM).
"""

import argparse
import contextlib
import getpass
import os
import random
import re
import secrets
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from node_space import ClusterError, Network, Processor, program_path, search_path

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sbatch", "srun", "squeue", "scancel", "sinfo")
# The path of a unix socket has at most 107 bytes; the longest here is that of a job step, /spool/node4/node4_JOB.STEP
LONGEST_FOLDER = 66
# Below the range from which Linux assigns ephemeral ports.
PORTS = range(11000, 31000)
_ENDED = {
    *("COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"),
    *("BOOT_FAIL", "DEADLINE", "REVOKED"),
}
# Devices that every user may name as GPUs; root creates as many as requested.
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

CONFIG = """\
ClusterName=throwaway
SlurmctldHost={host}({controller_address})
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.own
SlurmdPidFile={folder}/run/slurmd-%n.own
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
TaskProlog={folder}/etc/task_prolog
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=200000,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
# The nodes pose as larger than the machine on which they live.
SlurmdParameters=config_overrides
# A node that an administrator took out stays out; one that was silent comes back by itself.
ReturnToService=1
SlurmctldTimeout=10
SlurmdTimeout={node_timeout_s}
KillWait={kill_wait_s}
# A job that ends while the controller is away must not drain its nodes when the controller is back.
UnkillableStepTimeout=180
CompleteWait=0
InactiveLimit=0
Waittime=0
# The fault campaign counts the jobs of a run that may take longer than Slurm's default of 300 s.
MinJobAge=7200
# Ids that no earlier cluster has given: whoever remembers a job must not take another one for it.
FirstJobId={first_job}
GresTypes=gpu
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1 GraceTime=20
PartitionName=first Nodes={names} MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""

# Slurm puts the output of this script into the environment of a task. It does nothing for a batch script, whose
# environment would be passed on to the steps on all nodes.
TASK_PROLOG = """\
#!/bin/sh
[ -n "$SLURM_STEP_ID" ] || exit 0
cd {disturbed} || exit 0
[ ! -e "$SLURMD_NODENAME.variables" ] || cat "$SLURMD_NODENAME.variables"
[ ! -e "$SLURMD_NODENAME.clock" ] || {{
    echo "export RLHF_TEST_CLOCK_OFFSET_S=$(cat "$SLURMD_NODENAME.clock")"
    echo "export LD_PRELOAD=$PWD/clock.so${{LD_PRELOAD:+:$LD_PRELOAD}}"
}}
"""


class Cluster:
    """One cluster; :meth:`up` starts it, :meth:`down` ends it completely.

    Args:
        folder: All its files. An existing cluster in it is found again, even by another process.
        nodes: Number of nodes, named ``node1``, ``node2`` ...
        cpus: Cores that each node claims to have, whatever the machine has.
        gpus: GPUs that each node claims to have; jobs get ``CUDA_VISIBLE_DEVICES``, but the GPUs do not exist.
        node_timeout_s: Silence of a slurmd after which the controller considers its node dead, in seconds.
        kill_wait_s: Time between SIGTERM and SIGKILL when a job is cancelled, in seconds.
        namespaces: Give every node its own network, address, host name and control group; requires root.

    Raises:
        ClusterError: a program is missing, the folder's path is too long for a unix socket, or another user can change
            what is in the folder.
    """

    def __init__(
        self,
        folder: Path | str,
        nodes: int = 4,
        cpus: int = 8,
        gpus: int = 0,
        *,
        node_timeout_s: int = 5,
        kill_wait_s: int = 5,
        namespaces: bool = False,
    ) -> None:
        _require_own(Path(folder))
        self.folder = Path(folder).resolve()
        if len(str(self.folder)) > LONGEST_FOLDER:
            raise ClusterError(
                f"found a folder of {len(str(self.folder))} letters, {self.folder}; "
                f"unix sockets allow {LONGEST_FOLDER}: choose a shorter path, for instance under /tmp"
            )
        missing = missing_programs()
        if missing:
            raise ClusterError(
                f"missing: {', '.join(missing)}; "
                "install slurmctld, slurmd, slurm-client and munge (on Debian: sh infra/system_packages.sh slurm)"
            )
        self.nodes = tuple(f"node{index}" for index in range(1, nodes + 1))
        self._cpus, self._gpus = cpus, gpus
        self._node_timeout_s, self._kill_wait_s = node_timeout_s, kill_wait_s
        self._namespaces = namespaces
        self._network, self._processor = Network(self.folder), Processor(self.folder)

    @property
    def conf(self) -> Path:
        """The configuration: ``SLURM_CONF`` for every program that uses this cluster."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for every command that uses this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    # -----------------------------------------------------------------------------------------------------------------
    # The whole cluster

    def up(self) -> None:
        """Start every daemon, and wait until all nodes are idle; takes 1 to 2 seconds on an idle machine.

        Raises:
            ClusterError: it did not start, and nothing is left running; or one is running there, which is left alone.
        """
        if self.is_there():
            raise ClusterError(f"a cluster already runs in {self.folder}; end it with `cluster.py down {self.folder}`")
        try:
            self._write()
            for name in ("munged", "slurmctld", *(f"slurmd-{node}" for node in self.nodes)):
                self.start(name)
            self._wait(lambda: self._states() == {"idle"}, "all nodes to be idle")
        except BaseException:
            self.down()
            raise

    def is_there(self) -> bool:
        """True if any of its daemons is running."""
        return any(self.pid(path.stem) for path in (self.folder / "run").glob("*.pid"))

    def answers(self) -> bool:
        """True if its controller answers."""
        return self.conf.exists() and " UP" in self.command("scontrol", "ping", check=False)

    def down(self) -> None:
        """End all jobs and daemons; harmless if nothing is running. The files stay."""
        if self.answers():
            with contextlib.suppress(subprocess.SubprocessError):
                self.command("scancel", f"--user={getpass.getuser()}", check=False)
                deadline = time.monotonic() + 2 * self._kill_wait_s + 5
                while self._is_at_work() and time.monotonic() < deadline:
                    time.sleep(0.2)
        running = sorted(path.stem for path in (self.folder / "run").glob("*.pid"))
        for name in sorted(running, key=lambda name: ("munged" in name, "slurmctld" in name)):
            self.stop(name)
        self._undisturb()

    @contextlib.contextmanager
    def running(self) -> "Iterator[Cluster]":
        """Start it for the block, and end it completely afterwards."""
        self.up()
        try:
            yield self
        finally:
            self.down()

    # -----------------------------------------------------------------------------------------------------------------
    # Single daemons

    def start(self, name: str) -> None:
        """Start one daemon, ``munged``, ``slurmctld`` or ``slurmd-NODE``, and wait until it answers.

        Raises:
            ClusterError: it did not answer in time.
        """
        munge = self.folder / "munge"
        if name == "munged":
            # --force: the folder need not belong to a user called munge.
            words = ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket"]
            words += [f"--key-file={munge}/key", f"--seed-file={munge}/seed", f"--pid-file={munge}/own"]
            self._spawn(name, [*words, f"--log-file={self.folder}/log/munged.log"])
            self._wait(lambda: self._lives(name) and (self.folder / "munge.socket").exists(), name)
        elif name == "slurmctld":
            self._spawn(name, ["slurmctld", "-D"])
            self._wait(lambda: self._lives(name) and self.answers(), name)
        else:
            node = name.removeprefix("slurmd-")
            if node not in self.nodes:
                raise ClusterError(f"found {name}; the daemons are munged, slurmctld and slurmd-{self.nodes[0]} ...")
            self._spawn(name, self._network.inside(node, ["slurmd", "-D", "-N", node]))
            if self._network.has(node):
                pid = self.pid(name)
                assert pid is not None
                self._processor.add(node, pid)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End one daemon with a signal, and wait until it is gone; harmless if it is not running."""
        pid = self.pid(name)
        file = self._pid_file(name)
        if pid is None:
            file.unlink(missing_ok=True)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            # slurmctld has to save its state; a slurmd that still remembers an ended job may sleep for a long time.
            deadline = time.monotonic() + (10 if name == "slurmctld" else 2)
            while _lives(pid):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
        file.unlink(missing_ok=True)

    def pid(self, name: str) -> int | None:
        """Process id of a daemon that this cluster started, if it is alive; None otherwise."""
        try:
            pid, born = self._pid_file(name).read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        # The start time distinguishes it from a later process with the same id.
        return int(pid) if _lives(int(pid)) and _born(int(pid)) == born else None

    # -----------------------------------------------------------------------------------------------------------------
    # Disturbances of one node

    def slow_link(self, node: str, rate_mbit: float, latency_ms: float = 0) -> None:
        """Limit each direction of the node's cable to ``rate_mbit`` megabits per second, delayed by ``latency_ms``.

        Raises:
            ClusterError: the cluster has no namespaces, or the kernel cannot delay packets.
        """
        self._network.slow(self._known(node), rate_mbit, latency_ms)

    def cut_link(self, node: str) -> None:
        """Make the node's cable drop everything in both directions: nothing is refused, and nothing arrives.

        Raises:
            ClusterError: the cluster has no namespaces.
        """
        self._network.cut(self._known(node))

    def mend_link(self, node: str) -> None:
        """Let the node's cable pass everything again; harmless if it does already.

        Raises:
            ClusterError: the cluster has no namespaces.
        """
        self._network.mend(self._known(node))

    def slow_cpu(self, node: str, share: float) -> None:
        """Limit everything that runs on the node, now and later, to ``share`` cores in total: 0.25 is a quarter of a
        core.

        Raises:
            ClusterError: the cluster has no namespaces or no control groups, or the share is below 0.01.
        """
        self._processor.slow(self._known(node), share)

    def mend_cpu(self, node: str) -> None:
        """Remove the limit on the node's processor time; harmless if there is none.

        Raises:
            ClusterError: the cluster has no namespaces or no control groups.
        """
        self._processor.mend(self._known(node))

    def prioritize_cpu(self, weight: int) -> None:
        """Give each node the weight of ``weight`` processes outside the cluster; nodes start with 1.

        All nodes share the processors of one machine: next to other work a healthy node may get as little as one that
        :meth:`slow_cpu` has slowed down. Harmless if control groups cannot be created.
        """
        self._processor.prioritize(weight)

    def variables(self, node: str, /, **values: str | int | float | None) -> None:
        """Set variables for the tasks that later steps start on the node, and unset those that are None.

        They replace those of an earlier call; without values the node is like the others again.

        Raises:
            ClusterError: a value has several lines, which Slurm cannot pass on.
        """
        lines = []
        for name, value in values.items():
            if "\n" in str(value):
                raise ClusterError(f"found a value of {name} with more than one line")
            lines.append(f"unset {name}\n" if value is None else f"export {name}={value}\n")
        self._disturb(node, "variables", "".join(lines))

    def clock(self, node: str, offset_s: float) -> None:
        """Move the wall clock that tasks of later steps on the node see ahead by ``offset_s``; 0 ends it.

        Only programs that query the C library see it. File times, and the time since boot, stay correct.

        Raises:
            ClusterError: there is no C compiler, or it failed.
        """
        library = self.folder / "disturbed" / "clock.so"
        if offset_s and not library.exists():
            self._compile(Path(__file__).with_name("node_clock.c"), library)
        self._disturb(node, "clock", str(offset_s) if offset_s else "")

    def _disturb(self, node: str, kind: str, text: str) -> None:
        file = self.folder / "disturbed" / f"{self._known(node)}.{kind}"
        if not text:
            file.unlink(missing_ok=True)
            return
        # A task may start at this moment: it must find either the whole text or none.
        draft = file.with_suffix(".draft")
        draft.write_text(text)
        draft.replace(file)

    def _compile(self, source: Path, library: Path) -> None:
        compiler = program_path("cc")
        if compiler is None:
            raise ClusterError("missing: cc, which makes the library that shifts the clock; install gcc")
        draft = library.with_suffix(".draft")
        # After the source, or the linker would leave out the mathematics library.
        self.command(compiler, "-O2", "-shared", "-fPIC", "-o", str(draft), str(source), "-lm")
        draft.replace(library)

    def _known(self, node: str) -> str:
        nodes = _nodes_of(self.conf)
        if node not in nodes:
            raise ClusterError(f"found {node}; the nodes of {self.folder} are {', '.join(nodes) or 'none'}")
        return node

    # -----------------------------------------------------------------------------------------------------------------
    # Queries

    def command(self, *words: str, check: bool = True, timeout_s: float = 60) -> str:
        """Run a Slurm command against this cluster, and return its output without surrounding white space.

        Raises:
            ClusterError: it failed; the message includes its output.
        """
        done = subprocess.run(
            words, env=self._full_environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            raise ClusterError(
                f"{' '.join(words)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}"
            )
        return done.stdout.strip()

    def _states(self) -> set[str]:
        return set(self.command("sinfo", "--noheader", "--Node", "--format=%T", check=False).split())

    # -----------------------------------------------------------------------------------------------------------------
    # Files and processes

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _require_own(self.folder)
        for path in (
            "run",
            "log",
            "etc",
            "state",
            "munge",
            "dev",
            "disturbed",
            *(f"spool/{node}" for node in self.nodes),
        ):
            (self.folder / path).mkdir(parents=True, exist_ok=True)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge" / "key"
        if not key.exists():
            key.touch(0o600)
            key.write_bytes(secrets.token_bytes(128))
            key.chmod(0o400)
        self._undisturb()
        bridge, addresses = self._network.make(self.nodes) if self._namespaces else ("127.0.0.1", {})
        ports = iter(_free_ports(len(self.nodes) + 1))
        names = ",".join(self.nodes)
        fields = {
            "host": socket.gethostname(),
            "user": getpass.getuser(),
            "folder": self.folder,
            "controller_address": bridge,
            "controller_port": next(ports),
            "node_timeout_s": self._node_timeout_s,
            "kill_wait_s": self._kill_wait_s,
            "first_job": 1 + int(time.time()) % 60_000_000,
            "nodes": "\n".join(self._node_lines(addresses, ports)),
            "names": names,
        }
        self.conf.write_text(CONFIG.format(**fields))
        prolog = self.folder / "etc" / "task_prolog"
        prolog.write_text(TASK_PROLOG.format(disturbed=shlex.quote(str(self.folder / "disturbed"))))
        prolog.chmod(0o755)
        if self._gpus:
            lines = [f"NodeName={names} Name=gpu File={device}\n" for device in self._devices()]
            (self.folder / "etc" / "gres.conf").write_text("".join(lines))

    def _is_at_work(self) -> bool:
        """True if a job has not ended, or a step of one is alive.

        A job without any process may be reported as completing for another minute: slurmd checks it ever more rarely.
        """
        jobs = self.command("squeue", "--noheader", "--states=all", "--format=%T", check=False).split()
        return not _ENDED.issuperset(jobs) or any(self._steps())

    def _steps(self) -> Iterator[int]:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone, or belongs to another user
                if (process / "comm").read_text().strip() != "slurmstepd":
                    continue
                if f"SLURM_CONF={self.conf}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    yield int(process.name)

    def _undisturb(self) -> None:
        self._network.remove()
        self._processor.remove()
        for kind in ("variables", "clock"):
            for file in (self.folder / "disturbed").glob(f"*.{kind}"):
                file.unlink()

    def _node_lines(self, addresses: Mapping[str, str], ports: Iterator[int]) -> Iterator[str]:
        for node in self.nodes:
            has = f"CPUs={self._cpus} RealMemory=8000" + (f" Gres=gpu:{self._gpus}" if self._gpus else "")
            host, address = (node, addresses[node]) if addresses else (socket.gethostname(), "127.0.0.1")
            where = f"NodeHostname={host} NodeAddr={address} Port={next(ports)}"
            yield f"NodeName={node} {where} {has} State=UNKNOWN"

    def _devices(self) -> list[str]:
        # Slurm sets CUDA_VISIBLE_DEVICES only for devices, not for regular files.
        if os.geteuid() != 0:
            if self._gpus > len(DEVICES):
                raise ClusterError(f"found --gpus {self._gpus}; only root can make more than {len(DEVICES)} per node")
            return list(DEVICES[: self._gpus])
        devices = [self.folder / "dev" / f"gpu{index}" for index in range(self._gpus)]
        for device in devices:
            if not device.exists():
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        return [str(device) for device in devices]

    def _spawn(self, name: str, words: list[str]) -> None:
        if self.pid(name) is not None:
            raise ClusterError(f"{name} already runs in {self.folder}")
        program = program_path(words[0])
        assert program is not None
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                [program, *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._full_environment(),
                start_new_session=True,
            )
        self._pid_file(name).write_text(f"{process.pid} {_born(process.pid)}")

    def _lives(self, name: str) -> bool:
        if self.pid(name) is None:
            log = self.folder / "log" / f"{name}.out"
            last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
            raise ClusterError(f"{name} ended at once; it said: {last} (all of it: {log})")
        return True

    def _pid_file(self, name: str) -> Path:
        return self.folder / "run" / f"{name}.pid"

    def _full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment, "PATH": search_path()}

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {timeout_s:.0f} s for {what}; its log lies in {self.folder / 'log'}")
            time.sleep(0.05)


def missing_programs() -> list[str]:
    """Programs of Slurm and munge that are missing on this machine."""
    return [program for program in PROGRAMS if program_path(program) is None]


def _require_own(folder: Path) -> None:
    """Refuse a folder whose content another user could provide: /tmp/slurm may exist already, and a link in it would
    have this user, often root, overwrite files elsewhere.

    Raises:
        ClusterError: it is a link or a folder of another user, or every user may write to it.
    """
    for found in (folder.lstat, folder.stat) if os.path.lexists(folder) else ():
        try:
            owner, mode = found().st_uid, found().st_mode
        except OSError as error:
            raise ClusterError(f"cannot use {folder}: {error.strerror}") from None
        if owner != os.geteuid():
            raise ClusterError(f"found {folder} of user {owner}, expected a folder of user {os.geteuid()}, or none")
        if not stat.S_ISLNK(mode) and mode & 0o002:
            raise ClusterError(f"found {folder}, to which every user may write; choose another one, or chmod o-w it")


def _nodes_of(conf: Path) -> list[str]:
    return re.findall(r"^NodeName=(\S+)", conf.read_text(), re.MULTILINE) if conf.exists() else []


def _born(pid: int) -> str:
    """Start time of a process in clock ticks since boot, field 22 of proc(5)'s ``stat``; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _lives(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # if it is a child of this process, so that it does not stay as a zombie
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _free_ports(number: int) -> range:
    """Consecutive ports on which no process listens."""
    for _ in range(100):
        first = random.randrange(PORTS.start, PORTS.stop - number)
        with contextlib.ExitStack() as taken:
            try:
                for port in range(first, first + number):
                    taken.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return range(first, first + number)
    raise ClusterError(f"found no {number} free ports in a row between {PORTS.start} and {PORTS.stop}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up")
    up.add_argument("folder", type=Path)
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--cpus", type=int, default=8, help="cores that each node claims to have")
    up.add_argument("--gpus", type=int, default=0, help="GPUs that each node claims to have")
    up.add_argument("--namespaces", action="store_true", help="each node has its own network (only root may)")
    actions.add_parser("down").add_argument("folder", type=Path)
    of_node = {}
    for action in ("slow-link", "cut-link", "mend-link", "slow-cpu", "mend-cpu", "variables", "clock"):
        of_node[action] = actions.add_parser(action)
        of_node[action].add_argument("folder", type=Path)
        of_node[action].add_argument("node")
    of_node["slow-link"].add_argument("rate_mbit", type=float, help="megabits per second, in each direction")
    of_node["slow-link"].add_argument("--latency-ms", type=float, default=0, help="in each direction")
    of_node["slow-cpu"].add_argument("share", type=float, help="cores for all of the node: 0.25 is a quarter of one")
    of_node["variables"].add_argument("values", nargs="*", metavar="NAME[=VALUE]", help="a bare NAME is unset")
    of_node["clock"].add_argument("offset_s", type=float, help="seconds by which the node's clock is ahead")
    return parser


def _do(arguments: argparse.Namespace) -> None:
    if arguments.action == "up":
        cluster = Cluster(
            arguments.folder, arguments.nodes, arguments.cpus, arguments.gpus, namespaces=arguments.namespaces
        )
        if cluster.is_there() and cluster.answers():  # a second terminal wants to use it
            print(f"a cluster already runs in {cluster.folder}: it is used as it is", file=sys.stderr)
        else:
            cluster.up()
        print(f"export SLURM_CONF={cluster.conf}")
        return
    cluster = Cluster(arguments.folder)
    match arguments.action:
        case "down":
            cluster.down()
        case "slow-link":
            cluster.slow_link(arguments.node, arguments.rate_mbit, arguments.latency_ms)
        case "cut-link":
            cluster.cut_link(arguments.node)
        case "mend-link":
            cluster.mend_link(arguments.node)
        case "slow-cpu":
            cluster.slow_cpu(arguments.node, arguments.share)
        case "mend-cpu":
            cluster.mend_cpu(arguments.node)
        case "variables":
            pairs = (text.partition("=") for text in arguments.values)
            cluster.variables(arguments.node, **{name: value if equals else None for name, equals, value in pairs})
        case "clock":
            cluster.clock(arguments.node, arguments.offset_s)


def main() -> int:
    """Run the command line, and return its exit code."""
    try:
        _do(_parser().parse_args())
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
