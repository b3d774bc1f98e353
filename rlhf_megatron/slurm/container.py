"""Where a task's command runs: in the environment as it is, or in a container."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.errors import UserError


@dataclass(frozen=True)
class Container:
    """An image and what it sees of the cluster's disks; without an image, the plain environment."""

    image: str = ""
    runtime: str = ""
    """pyxis (the srun plugin over enroot), or the path of apptainer or singularity."""
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER paths."""
    workdir: str = ""
    gpus: bool = False

    def srun_options(self) -> list[str]:
        if self.runtime != "pyxis":
            return []
        return [
            f"--container-image={self.image}",
            f"--container-mounts={','.join(self.mounts)}",
            f"--container-workdir={self.workdir}",
        ]

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command of a task. Nothing stays between srun and it: signals and exit codes pass."""
        if self.runtime in ("", "pyxis"):
            return list(command)
        gpus = ["--nv"] if self.gpus else []
        binds = [word for mount in self.mounts for word in ("--bind", mount)]
        return [self.runtime, "exec", *gpus, *binds, "--pwd", self.workdir, self.image, *command]


def choose_container(
    image: str, *, mounts: str, seen: Sequence[Path], workdir: Path, gpus: bool
) -> Container:
    """The container of an image: a .sif file through apptainer, anything else through pyxis.

    mounts: comma-separated, PATH or HOST:CONTAINER; `seen`: folders that are mounted as well, at
    their own paths. Raises UserError where the cluster has no means to run it.
    """
    if not image:
        return Container()
    if image.endswith(".sif"):
        runtime = shutil.which("apptainer") or shutil.which("singularity") or ""
        if not runtime:
            raise UserError(
                f"CONTAINER_IMAGE={image}: a .sif file needs apptainer or singularity, and neither "
                "is on PATH; load its module in the script, or leave CONTAINER_IMAGE empty"
            )
        if not Path(image).is_file():
            raise UserError(f"CONTAINER_IMAGE={image}: no such file; give the path of a .sif file")
    else:
        runtime = "pyxis"
        if "--container-image" not in _srun_help():
            raise UserError(
                f"CONTAINER_IMAGE={image}: this srun knows no --container-image (pyxis is not "
                "installed); give a .sif file for apptainer, or leave CONTAINER_IMAGE empty"
            )
    all_mounts = [m if ":" in m else f"{m}:{m}" for m in mounts.split(",") if m]
    all_mounts += [f"{path}:{path}" for path in seen]
    return Container(image, runtime, tuple(dict.fromkeys(all_mounts)), str(workdir), gpus)


def not_mounted(container: Container, *, overrides: Iterable[str]) -> list[str]:
    """A problem for each key whose value is a path here that the container cannot see."""
    if not container.image:
        return []
    targets = [Path(mount.split(":")[1]) for mount in container.mounts]
    problems = []
    for override in overrides:
        key, _, value = override.partition("=")
        path = Path(value.split(":")[0])  # reward.function is FILE:NAME
        if not path.is_absolute() or not path.exists():
            continue
        if not any(target in (path, *path.parents) for target in targets):
            problems.append(
                f"{key}={value}: the container does not see it; start with "
                f"CONTAINER_MOUNTS={path if path.is_dir() else path.parent}"
            )
    return problems


def _srun_help() -> str:
    try:
        return subprocess.run(["srun", "--help"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
