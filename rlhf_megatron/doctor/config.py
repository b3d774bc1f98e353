"""Options of the preflight."""

from dataclasses import dataclass

from rlhf_megatron.schema import number


@dataclass(kw_only=True)
class DoctorConfig:
    """What is looked at before a run, and what is expected of the machines. docs/doctor.md."""

    at_start: bool = True
    """Look at versions, GPUs, memory, disk, files and clocks when a training job starts, in about a
    second. What would end or spoil the run stops it with exit code 2, the rest is printed as
    warnings. Bandwidths are measured by `rlhf-megatron doctor` alone. Default true."""

    timeout_seconds: float = number(120.0, minimum=0, exclusive=True)
    """How long a rank may stay in one part of the preflight (a file system that does not answer, a
    collective that hangs) before the job ends with its name. Seconds, default 120."""

    node_bandwidth_gb_per_second: float = number(0.0, minimum=0)
    """Least bus bandwidth of all-reduce and all-gather between the GPUs of a node, in 10^9 bytes a
    second as nccl-tests counts them. Less is a red line. 0 (default): what is usual for the GPU, if
    it is known, and less only warns."""

    cross_node_bandwidth_gb_per_second: float = number(0.0, minimum=0)
    """The same between nodes, for each GPU, all of them at once: groups of the ranks with the same
    number on their node. A port of 400 Gb/s for each GPU gives 40 to 48."""

    checkpoint_write_gb_per_second: float = number(0.0, minimum=0)
    """Least speed of all nodes together at writing into run.output_dir, in 10^9 bytes a second.
    Less is a red line. 0 (default): only a checkpoint that would take over 10 minutes warns."""

    max_clock_skew_seconds: float = number(5.0, minimum=0, exclusive=True)
    """The clocks of two nodes may differ by so much before it warns; ten times as much is a red
    line, since time limits and logs go by them. Default 5."""
