"""A real Slurm of several nodes on this machine: slurmctld, one slurmd per node, munged.

Everything lives in one folder: configuration, key, sockets, logs, state. Needs root and Debian's
packages slurm-wlm and munge. `python tests/slurm/cluster.py DIR` starts one to play with.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
NODES = ("n1", "n2", "n3")
CPUS_PER_NODE = 2
SECONDS_TO_START = 40.0
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPort={port}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=2
ReturnToService=2
SlurmdTimeout={slurmd_timeout_seconds}
KillWait={kill_wait_seconds}
JobRequeue=1
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing_for_slurm() -> str:
    """Why no Slurm can be started here; "" where one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    if missing:
        return f"no {', '.join(missing)} here (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "slurmctld and slurmd are started as root"
    return ""


class Cluster:
    """A context manager: the nodes are idle inside it, and nothing of it runs afterwards."""

    def __init__(
        self, folder: Path, *, slurmd_timeout_seconds: int = 20, kill_wait_seconds: int = 60
    ) -> None:
        self.folder = folder.resolve()
        self.configuration = self.folder / "slurm.conf"
        self._timeout, self._kill_wait = slurmd_timeout_seconds, kill_wait_seconds
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        self._write_configuration()
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-c")
            for node in NODES:
                self.start_node(node)
            self.wait_for_idle_nodes()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *words: str, **environment: str) -> str:
        """The output of a Slurm command, such as run("scontrol", "show", "job", "3")."""
        done = subprocess.run(
            [self._program(words[0]), *words[1:]],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """For processes that talk to this cluster."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SRUN"))}
        return kept | {"SLURM_CONF": str(self.configuration), "PATH": SEARCHED}

    def states(self) -> list[str]:
        """Of the nodes, one each, as sinfo calls them."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").split()

    def wait_for_idle_nodes(self) -> None:
        self._wait(lambda: self.states().count("idle") == len(NODES), what="idle nodes")

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_job(
        self,
        job: str,
        *,
        until: Callable[[dict[str, str]], bool],
        timeout_seconds: float,
    ) -> dict[str, str]:
        """What `scontrol show job` says once `until` holds for it."""
        deadline = time.monotonic() + timeout_seconds
        while not until(found := self.job(job)):
            assert time.monotonic() < deadline, f"job {job} is {found['JobState']}"
            time.sleep(0.5)
        return found

    def start_node(self, node: str) -> None:
        self._start(f"slurmd {node}", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """SIGKILL to its slurmd and to whatever it has started, as where the power fails."""
        daemon = self._daemons.pop(f"slurmd {node}")
        victims = set()
        for process in self._processes():
            with suppress(psutil.Error):
                environment = process.environ()
                if node in (environment.get("TEST_NODE"), environment.get("SLURMD_NODENAME")):
                    victims.add(process)
                    # A slurmstepd has written its title over its environment.
                    above = process.parents()
                    victims.update(p for p in above if p.name().startswith("slurmstepd"))
        for send in (psutil.Process.suspend, psutil.Process.kill):  # none reports another's death
            for process in victims:
                with suppress(psutil.Error):
                    send(process)
        daemon.wait()

    def stop(self) -> None:
        """End the daemons and whatever they have started."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()

    def text(self) -> str:
        """The logs of the daemons."""
        logs = sorted(self.folder.glob("*.log"))
        return "".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in logs)

    def _processes(self) -> Iterator[psutil.Process]:
        """All that was started by this cluster's daemons."""
        own = os.fsencode(f"SLURM_CONF={self.configuration}")
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                # As bytes: a slurmstepd has written its title over a part of its environment.
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if process.pid != os.getpid() and own in environment:
                    yield process

    def _write_configuration(self) -> None:
        host = socket.gethostname().split(".")[0]
        ports = _free_ports(len(NODES) + 1)
        nodes = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostName={host} Port={port} "
            f"CPUs={CPUS_PER_NODE} RealMemory=1000"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        self.configuration.write_text(
            CONFIGURATION.format(
                host=host,
                folder=self.folder,
                port=ports[0],
                slurmd_timeout_seconds=self._timeout,
                kill_wait_seconds=self._kill_wait,
                nodes="\n".join(nodes),
                names=",".join(NODES),
            )
        )

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        options = {"key-file": key, "socket": self.folder / "munge.socket"}
        options |= {f"{n}-file": self.folder / f"munge.{n}" for n in ("pid", "seed", "log")}
        self._start(
            "munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in options.items())
        )
        self._wait((self.folder / "munge.socket").exists, what="munged")

    def _start(self, name: str, *words: str) -> None:
        program, _, node = name.partition(" ")
        with (self.folder / f"{name.replace(' ', '_')}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [self._program(program), *words],
                env=self.environment | ({"TEST_NODE": node} if node else {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, ready: Callable[[], bool], *, what: str) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            with suppress(AssertionError):  # slurmctld does not answer yet
                if ready():
                    return
            assert time.monotonic() < deadline, f"no {what} in time\n{self.text()}"
            time.sleep(0.2)

    @staticmethod
    def _program(name: str) -> str:
        found = shutil.which(name, path=SEARCHED)
        assert found is not None, name
        return found


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def main(words: Sequence[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Cluster(Path(words[0])) as cluster:
        print(f"export SLURM_CONF={cluster.configuration}", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
