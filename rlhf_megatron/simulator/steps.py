"""The tasks of a run's steps, in the order in which a rank comes to them, and what they add up to.

As the trainer runs them (step.py): with roles on different ranks all meet in `exchange`.
pipeline.depth 0:

    rollout, meet, reward, meet, log_prob | ref_log_prob | value, meet, advantage,
    update_critic | update_actor, reshard, meet

and 1, of which batch k + 1 is one step older:

    advantage of k, rollout of k + 1 | update_critic on k, meet,
    update_actor on k, log_prob of k + 1 | ref_log_prob | value, reshard, reward, meet

Phases with | between them run side by side on ranks of their own, and one after the other on ranks
that they share.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_megatron.simulator.costs import PhaseCost, phase_costs
from rlhf_megatron.simulator.schedule import Schedule, Task, run_tasks
from rlhf_megatron.simulator.setup import Setup

ROLE_OF_PHASE = {
    "log_prob": "actor",
    "ref_log_prob": "ref",
    "value": "critic",
    "update_critic": "critic",
    "update_actor": "actor",
    "rollout": "rollout",
    "sleep": "rollout",
    "reward": "reward",
}
ALONE = ("rollout", "sleep", "reward")
"""Phases in which the parts of a role (engines, ranks) do not wait for each other."""
WARM_STEPS = 1
"""After which every step is like the last."""


@dataclass(frozen=True, kw_only=True)
class SimulatedPhase:
    """A phase in the last step that was simulated."""

    name: str
    ranks: tuple[int, ...]
    cost: PhaseCost
    """Of one passage, with nothing else on the nodes."""
    passages: int
    begin_seconds: float
    """Of the first passage, since the step's begin."""
    end_seconds: float
    """Of the last."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step in the steady state."""

    setup: Setup
    step_seconds: float
    idle_shares: Mapping[int, float]
    """Rank -> share of the step outside phases, or in `exchange` waiting for others."""
    phases: tuple[SimulatedPhase, ...]

    @property
    def samples_per_second(self) -> float:
        return self.setup.num_samples / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens."""
        return self.samples_per_second * self.setup.workload.sample_tokens

    @property
    def idle_share(self) -> float:
        """Mean over ranks."""
        return sum(self.idle_shares.values()) / len(self.idle_shares)

    def idle_of(self, role: str) -> float:
        """Mean over the ranks of a role."""
        ranks = self.setup.ranks_of[role]
        return sum(self.idle_shares[rank] for rank in ranks) / len(ranks)


def simulate(setup: Setup, *, costs: Mapping[str, PhaseCost] | None = None) -> Simulation:
    """Run a few steps, and look at the last. `costs`: by default those of `setup`."""
    costs = phase_costs(setup) if costs is None else costs
    classes = rank_classes(setup)
    tasks = step_tasks(setup, costs=costs, classes=classes, num_steps=WARM_STEPS + 1)
    cluster = setup.cluster
    schedule = run_tasks(tasks, cores_per_node=cluster.cores_per_node, node_of=cluster.node_of)
    begin, end = schedule.end_of_step(WARM_STEPS), schedule.end_of_step(WARM_STEPS + 1)
    idle = schedule.idle_shares(since=begin, until=end)
    return Simulation(
        setup=setup,
        step_seconds=end - begin,
        idle_shares={r: idle.get(first, 1.0) for first, of in classes.items() for r in of},
        phases=_phases(schedule, costs=costs, setup=setup, begin=begin),
    )


def rank_classes(setup: Setup) -> dict[int, tuple[int, ...]]:
    """First rank -> the ranks that have the same roles, and so do the same. Where cores are shared
    every rank counts by itself."""
    if setup.cluster.cores_per_node is not None:
        return {rank: (rank,) for rank in range(setup.world_size)}
    roles = [frozenset(ranks) for ranks in setup.ranks_of.values()]
    found: dict[tuple[bool, ...], list[int]] = {}
    for rank in range(setup.world_size):
        found.setdefault(tuple(rank in ranks for ranks in roles), []).append(rank)
    return {ranks[0]: tuple(ranks) for ranks in found.values()}


def step_tasks(
    setup: Setup,
    *,
    costs: Mapping[str, PhaseCost],
    classes: Mapping[int, tuple[int, ...]],
    num_steps: int,
) -> list[Task]:
    """The tasks of steps 1 to num_steps; a class of ranks appears by its first one."""
    builder = _Builder(setup, costs=costs, classes=classes)
    for step in range(1, num_steps + 1):
        if setup.depth == 0:
            builder.on_policy_step(step)
        else:
            builder.pipelined_step(step)
    return builder.tasks


class _Builder:
    """Lists the tasks step by step."""

    def __init__(
        self,
        setup: Setup,
        *,
        costs: Mapping[str, PhaseCost],
        classes: Mapping[int, tuple[int, ...]],
    ) -> None:
        self.tasks: list[Task] = []
        self._setup, self._costs = setup, costs
        shares_cores = setup.cluster.cores_per_node is not None
        self._seconds = {phase: cost.seconds for phase, cost in costs.items()}
        self._busy = {p: cost.busy_share if shares_cores else 1.0 for p, cost in costs.items()}
        ranks_of = setup.ranks_of
        self._ranks = {role: self._firsts(ranks, classes) for role, ranks in ranks_of.items()}
        self._ranks["everyone"] = tuple(sorted(classes))
        sync = {*ranks_of["actor"], *ranks_of["rollout"]}
        self._ranks["sync"] = self._firsts(tuple(sorted(sync)), classes)
        size = setup.engine_size
        rolling = ranks_of["rollout"]
        engines = [rolling[i : i + size] for i in range(0, len(rolling), size)]
        self._engines = sorted({self._firsts(engine, classes) for engine in engines})

    @staticmethod
    def _firsts(ranks: tuple[int, ...], classes: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
        wanted = frozenset(ranks)
        return tuple(first for first, of in classes.items() if not wanted.isdisjoint(of))

    def on_policy_step(self, step: int) -> None:
        self._phase("rollout", step)
        self._meet(step)
        self._phase("reward", step)
        self._meet(step)
        self._phase("sleep", step)
        for phase in ("log_prob", "ref_log_prob", "value"):
            self._phase(phase, step)
        self._meet(step)
        self._add("advantage", self._ranks["everyone"], step)
        self._phase("update_critic", step)
        self._phase("update_actor", step)
        self._add("reshard", self._ranks["sync"], step)
        self._meet(step)

    def pipelined_step(self, step: int) -> None:
        """The critic's update comes after the rollout on ranks that have both."""
        self._add("advantage", self._ranks["everyone"], step)
        self._phase("rollout", step)
        shares = not set(self._ranks["critic"]).isdisjoint(self._ranks["rollout"])
        if shares:
            self._meet(step)
        self._phase("update_critic", step)
        if not shares:
            self._meet(step)
        self._phase("sleep", step)
        for phase in ("update_actor", "log_prob", "ref_log_prob", "value"):
            self._phase(phase, step)
        self._add("reshard", self._ranks["sync"], step)
        self._phase("reward", step)
        self._meet(step)

    def _phase(self, phase: str, step: int) -> None:
        if phase not in self._costs:
            return
        ranks = self._ranks[ROLE_OF_PHASE[phase]]
        if phase in ("rollout", "sleep"):
            groups = self._engines
        elif phase in ALONE:
            groups = [(rank,) for rank in ranks]
        else:
            groups = [ranks]
        for group in groups:
            self._add(phase, group, step)

    def _meet(self, step: int) -> None:
        """All ranks wait for the last. Nothing where every rank has every role, which their phases
        keep together."""
        if self._setup.is_split:
            self._add("exchange", self._ranks["everyone"], step)

    def _add(self, phase: str, ranks: tuple[int, ...], step: int) -> None:
        seconds = self._seconds[phase]
        if seconds > 0 or phase == "exchange":
            busy = self._busy[phase]
            self.tasks.append(
                Task(name=phase, step=step, ranks=ranks, seconds=seconds, busy_share=busy)
            )


def _phases(
    schedule: Schedule, *, costs: Mapping[str, PhaseCost], setup: Setup, begin: float
) -> tuple[SimulatedPhase, ...]:
    ranks_of = setup.ranks_of
    spans: dict[str, list[tuple[float, float]]] = {}
    for task, start, end in zip(schedule.tasks, schedule.starts, schedule.ends, strict=True):
        if task.step == WARM_STEPS + 1:
            spans.setdefault(task.name, []).append((start, end))
    everyone = tuple(range(setup.world_size))
    sync = tuple(sorted({*ranks_of["actor"], *ranks_of["rollout"]}))
    found = []
    for name, times in spans.items():
        role = ROLE_OF_PHASE.get(name)
        found.append(
            SimulatedPhase(
                name=name,
                ranks=ranks_of[role] if role else sync if name == "reshard" else everyone,
                cost=costs[name],
                passages=len(times) if name == "exchange" else 1,
                begin_seconds=min(start for start, _ in times) - begin,
                end_seconds=max(end for _, end in times) - begin,
            )
        )
    return tuple(found)
