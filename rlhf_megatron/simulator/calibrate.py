"""Rates from a run: those with which the simulated phases take what the run's phases took.

A least-squares fit in logarithms (Levenberg-Marquardt) of all rates that the cluster's description
gives a value other than 0, which is also where the fit begins and where a rate stays that the run
says nothing about. Roles of different layouts in one run tell the costs of layouts apart.

Where ranks share cores, what a phase computes is its CPU time, whatever else the machine does; the
wall time tells how many cores the run had.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlhf_megatron.simulator.cluster import RATE_NAMES, Cluster, with_rates
from rlhf_megatron.simulator.costs import PhaseCost, phase_costs
from rlhf_megatron.simulator.measured import OUTSIDE, MeasuredRun
from rlhf_megatron.simulator.setup import Setup
from rlhf_megatron.simulator.steps import simulate

PHASE_ERROR = 0.03
"""Relative error of a measured phase."""
PRIOR_ERROR = 1.0
"""Of a rate in the description, as a factor's logarithm: within e of it, or nearly."""
MOST_ROUNDS = 60
LEAST_SECONDS = 1e-4
"""A phase of less says nothing."""
LARGEST_FACTOR = 3.0
STEP_PHASES = ("advantage", "sleep", OUTSIDE)
"""What Rates.step_seconds stands for."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fitted cluster, and how well it fits."""

    cluster: Cluster
    fitted: dict[str, float]
    """Rate -> its value over the description's."""
    phases: dict[str, tuple[float, float]]
    """Phase -> (simulated before the factors, measured) seconds: of CPU time where cores are
    shared."""
    step_seconds: tuple[float, float]
    """Simulated and measured."""


def calibrate(setup: Setup, *, run: MeasuredRun) -> Calibration:
    """`setup`: of the run's own configuration, on the described cluster."""
    uses_cpu_time = _uses_cpu_time(setup.cluster, run=run)
    observed = observations(run, uses_cpu_time=uses_cpu_time)
    start = setup.cluster
    names = [name for name in RATE_NAMES if getattr(start.rates, name) > 0]
    fitted = _fit(setup, names=names, observed=observed, uses_cpu_time=uses_cpu_time)
    with_fit = replace(setup, cluster=fitted)
    predicted = _predicted(phase_costs(with_fit), uses_cpu_time=uses_cpu_time)
    factors = {
        phase: min(max(seconds / predicted[phase], 1 / LARGEST_FACTOR), LARGEST_FACTOR)
        for phase, seconds in observed.items()
        if predicted.get(phase, 0.0) > 0
    }
    cluster = replace(fitted, phase_factors=factors, source=f"fitted to {run.folder}")
    if cluster.cores_per_node is not None:
        cluster = _with_cores(replace(setup, cluster=cluster), seconds=run.step_seconds)
    found = simulate(replace(setup, cluster=cluster))
    return Calibration(
        cluster=cluster,
        fitted={name: getattr(cluster.rates, name) / getattr(start.rates, name) for name in names},
        phases={phase: (predicted.get(phase, 0.0), seconds) for phase, seconds in observed.items()},
        step_seconds=(found.step_seconds, run.step_seconds),
    )


def observations(run: MeasuredRun, *, uses_cpu_time: bool) -> dict[str, float]:
    """Phase of the simulator -> what the run measured of it."""
    found: dict[str, float] = {}
    for name, phase in run.phases.items():
        at = "advantage" if name in STEP_PHASES else name
        seconds = phase.cpu_seconds if uses_cpu_time else phase.seconds
        found[at] = found.get(at, 0.0) + seconds
    found.pop("exchange", None)  # nearly all of it is waiting for others
    return {name: seconds for name, seconds in found.items() if seconds > LEAST_SECONDS}


def _uses_cpu_time(cluster: Cluster, *, run: MeasuredRun) -> bool:
    return cluster.cores_per_node is not None and run.step_cpu_seconds > 0


def _predicted(costs: Mapping[str, PhaseCost], *, uses_cpu_time: bool) -> dict[str, float]:
    return {
        phase: cost.busy_seconds if uses_cpu_time else cost.seconds for phase, cost in costs.items()
    }


def _fit(
    setup: Setup, *, names: Sequence[str], observed: Mapping[str, float], uses_cpu_time: bool
) -> Cluster:
    start = setup.cluster
    first = [getattr(start.rates, name) for name in names]

    def cluster_at(point: NDArray[np.float64]) -> Cluster:
        values = {n: v * math.exp(x) for n, v, x in zip(names, first, point, strict=True)}
        return with_rates(start, **values)

    def residuals(point: NDArray[np.float64]) -> NDArray[np.float64]:
        costs = phase_costs(replace(setup, cluster=cluster_at(point)))
        predicted = _predicted(costs, uses_cpu_time=uses_cpu_time)
        misses = [
            math.log(predicted[phase] / seconds) / PHASE_ERROR
            for phase, seconds in observed.items()
            if predicted.get(phase, 0.0) > 0
        ]
        return np.array([*misses, *(point / PRIOR_ERROR)])

    return cluster_at(least_squares(residuals, start=np.zeros(len(names))))


def least_squares(residuals, *, start: NDArray[np.float64]) -> NDArray[np.float64]:  # type: ignore[no-untyped-def]
    """The point with the least sum of squared residuals near `start`: Levenberg-Marquardt with
    differences for derivatives."""
    point, damping = start, 1e-3
    value = residuals(point)
    for _ in range(MOST_ROUNDS):
        step = 1e-5
        slopes = np.array(
            [(residuals(point + step * unit) - value) / step for unit in np.eye(len(point))]
        ).T
        normal, gradient = slopes.T @ slopes, slopes.T @ value
        if np.abs(gradient).max(initial=0.0) < 1e-9:
            break
        for _ in range(30):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -gradient)
            tried = residuals(point + move)
            if tried @ tried < value @ value:
                break
            damping *= 4
        else:
            break
        gained = value @ value - tried @ tried
        point, value, damping = point + move, tried, damping / 4
        if gained < 1e-10 * (value @ value + 1e-12):
            break
    return point


def _with_cores(setup: Setup, *, seconds: float) -> Cluster:
    """The cores with which a step takes so long; at most those that are described."""
    most = setup.cluster.cores_per_node
    assert most is not None

    def takes(cores: float) -> float:
        cluster = replace(setup.cluster, cores_per_node=cores)
        return simulate(replace(setup, cluster=cluster)).step_seconds

    few, many = most / 20, most
    if takes(many) >= seconds:
        return setup.cluster
    for _ in range(40):
        middle = (few + many) / 2
        if takes(middle) > seconds:
            few = middle
        else:
            many = middle
    return replace(setup.cluster, cores_per_node=many)
