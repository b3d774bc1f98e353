"""The machine of a simulation: its sizes, and its rates, measured or assumed.

A cluster description is a YAML file (configs/clusters/): the fields of Cluster, with `rates:` for
those of Rates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from rlhf_megatron.errors import ConfigError, UserError
from rlhf_megatron.loader import nearest


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a rank reaches. The defaults are of no machine; a description gives those that matter.

    Latencies are per call, bandwidths of one rank in one direction.
    """

    flops_per_second: float = 4e14
    """Model FLOP/s of a forward pass over long micro-batches."""
    train_flops_per_second: float = 4e14
    """The same of forward and backward together (three forward passes; recomputation on top)."""
    layer_seconds: float = 0.0
    """Fixed cost of a layer in a forward pass of one micro-batch: launches, Python."""
    micro_batch_seconds: float = 0.0
    """Fixed cost of a forward pass of one micro-batch on a stage: packing, loss, schedule."""
    collective_seconds: float = 0.0
    """Latency of a tensor-parallel collective."""
    hop_seconds: float = 0.0
    """Latency of sending a micro-batch to the next pipeline stage."""
    intra_node_bytes_per_second: float = 3e11
    inter_node_bytes_per_second: float = 4e10
    memory_bytes_per_second: float = 2e12
    """What decoding and the optimizer read and write."""
    host_bytes_per_second: float = 5e10
    """Between a GPU and its host's memory."""
    optimizer_seconds: float = 0.0
    """Fixed cost of an optimizer step."""
    decode_step_seconds: float = 0.0
    """Fixed cost of one token of all sequences of an engine."""
    decode_sequence_seconds: float = 0.0
    """Cost of one token of one sequence, beside memory and arithmetic: sampling."""
    reshard_bytes_per_second: float = 2e10
    reshard_seconds: float = 0.0
    """Fixed cost of a weight sync."""
    reward_sample_seconds: float = 0.0
    """Of one response, by the reward function on one rank."""
    reward_seconds: float = 0.0
    """Fixed cost of the reward phase."""
    phase_seconds: float = 0.0
    """Fixed cost of a phase of a model."""
    exchange_seconds: float = 0.0
    """Fixed cost of a passage in which roles on different ranks hand over."""
    step_seconds: float = 0.0
    """On every rank and step: advantages, writing, and what else lies outside the phases above."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A machine of equal nodes."""

    name: str
    ranks_per_node: int = 8
    """GPUs of a node; on CPUs processes."""
    memory_gb: float | None = 80.0
    """Of one GPU, in 10^9 bytes; None on CPUs."""
    host_memory_gb: float | None = None
    """Of a node, where known."""
    cores_per_node: float | None = None
    """None: every rank has a device of its own. A number: CPU cores that the node's busy ranks
    share."""
    rates: Rates = field(default_factory=Rates)
    phase_factors: Mapping[str, float] = field(default_factory=dict)
    """Measured over predicted seconds by phase, from a calibration; 1 where there is none."""
    source: str = "assumed"
    """Where the rates are from, in words."""

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def spans_nodes(self, ranks: tuple[int, ...]) -> bool:
        """Whether the ranks lie on more than one node."""
        return self.node_of(ranks[0]) != self.node_of(ranks[-1])

    def bytes_per_second(self, ranks: tuple[int, ...]) -> float:
        """Of one of the ranks to the others."""
        rates = self.rates
        if self.spans_nodes(ranks):
            return rates.inter_node_bytes_per_second
        return rates.intra_node_bytes_per_second


RATE_NAMES = tuple(f.name for f in fields(Rates))
_NUMBERS = ("ranks_per_node", "memory_gb", "host_memory_gb", "cores_per_node")
_NONE_ALLOWED = ("memory_gb", "host_memory_gb", "cores_per_node")
_KEYS = ("name", *_NUMBERS, "rates", "phase_factors", "source")


def read_cluster(path: str | Path) -> Cluster:
    """Raises UserError with all that is wrong: no such file, unknown keys, numbers out of range."""
    path = Path(path)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"--cluster {path}: no such file; give a description such as "
            "configs/clusters/h100_80gb.yaml"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--cluster {path}: not readable as YAML: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"--cluster {path}: must hold keys, such as name and rates")
    problems = [*_unknown(found, known=_KEYS, at="")]
    values: dict[str, Any] = {"name": str(found.get("name", path.stem))}
    for name in _NUMBERS:
        if name in found and not (found[name] is None and name in _NONE_ALLOWED):
            problems += _number_problems(found[name], at=name)
        if name in found:
            values[name] = found[name]
    tables: dict[str, Any] = {}
    for name in ("rates", "phase_factors"):
        tables[name] = found.get(name) or {}
        if not isinstance(tables[name], dict):
            problems.append(f"{name}={tables[name]}: must hold names and numbers")
            tables[name] = {}
        for key, value in tables[name].items():
            problems += _number_problems(value, at=f"{name}.{key}", zero=name == "rates")
    problems += _unknown(tables["rates"], known=RATE_NAMES, at="rates.")
    problems += [
        f"rates.{name}=0: must be above 0; leave it out for the default"
        for name in tables["rates"]
        if str(name).endswith("per_second") and tables["rates"][name] == 0
    ]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return Cluster(
        **values,
        rates=Rates(**{name: float(value) for name, value in tables["rates"].items()}),
        phase_factors={str(name): float(v) for name, v in tables["phase_factors"].items()},
        source=str(found.get("source", "assumed")),
    )


def write_cluster(cluster: Cluster, *, path: Path) -> None:
    """As `read_cluster` takes it."""
    plain = {name: getattr(cluster, name) for name in ("name", *_NUMBERS, "source")}
    plain["rates"] = {name: getattr(cluster.rates, name) for name in RATE_NAMES}
    plain["phase_factors"] = dict(cluster.phase_factors)
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")


def with_rates(cluster: Cluster, **values: float) -> Cluster:
    """The cluster with some rates changed."""
    return replace(cluster, rates=replace(cluster.rates, **values))


def _unknown(found: Mapping[Any, Any], *, known: tuple[str, ...], at: str) -> list[str]:
    return [
        f"{at}{key}: unknown key; did you mean {at}{nearest(str(key), candidates=known)}?"
        for key in found
        if key not in known
    ]


def _number_problems(value: Any, *, at: str, zero: bool = False) -> list[str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf"):
        return [f"{at}={value}: must be a finite number of at least 0; write 4e14 as 4.0e+14"]
    if value == 0 and not zero:
        return [f"{at}=0: must be above 0"]
    return []
