"""Who waits for whom: tasks on ranks, run in each rank's order, with cores shared where few.

    found = run_tasks([Task(name="rollout", step=1, ranks=(0, 1), seconds=2.0), ...])
    found.ends[0], found.idle_shares(since=..., until=...)

A task begins when all of its ranks have ended the tasks listed before it, and the tasks in `after`
have ended. On nodes with fewer cores than busy ranks, all tasks there slow down alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_NOTHING_LEFT = 1e-12


@dataclass(frozen=True, kw_only=True)
class Task:
    """One passage of some ranks through a phase, which they begin and end together."""

    name: str
    step: int
    ranks: tuple[int, ...]
    seconds: float
    """With nothing else on its nodes, and a core for every rank."""
    busy_share: float = 1.0
    """Part of that time in which a rank computes, and so takes a core."""
    after: tuple[int, ...] = ()
    """Places in the list of tasks that must have ended: of tasks before this one."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When each task began and ended, in seconds since the start."""

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def end(self) -> float:
        return max(self.ends, default=0.0)

    def end_of_step(self, step: int) -> float:
        return max(e for task, e in zip(self.tasks, self.ends, strict=True) if task.step == step)

    def busy_seconds(self, *, since: float, until: float) -> dict[int, float]:
        """Rank -> seconds inside tasks."""
        busy: dict[int, float] = {}
        for task, start, end in zip(self.tasks, self.starts, self.ends, strict=True):
            seconds = max(0.0, min(end, until) - max(start, since))
            for rank in task.ranks:
                busy[rank] = busy.get(rank, 0.0) + seconds
        return busy

    def idle_shares(self, *, since: float, until: float) -> dict[int, float]:
        """Rank -> share of the time outside tasks."""
        busy = self.busy_seconds(since=since, until=until)
        return {rank: max(0.0, 1.0 - seconds / (until - since)) for rank, seconds in busy.items()}


def one_node(rank: int) -> int:
    return 0


def run_tasks(
    tasks: Sequence[Task],
    *,
    cores_per_node: float | None = None,
    node_of: Callable[[int], int] = one_node,
) -> Schedule:
    """Run the tasks, listed in the order in which each rank comes to its own."""
    waits_for = _dependencies(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    for number, befores in enumerate(waits_for):
        for before in befores:
            followers[before].append(number)
    open_befores = [len(befores) for befores in waits_for]
    demands = [_demand(task, node_of=node_of) for task in tasks]
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    left = [task.seconds for task in tasks]
    running = {number for number, count in enumerate(open_befores) if count == 0}
    now = 0.0
    while running:
        speeds = _speeds(running, demands=demands, cores_per_node=cores_per_node)
        passes = min(left[number] / speeds[number] for number in running)
        now += passes
        ended = []
        for number in sorted(running):
            left[number] -= passes * speeds[number]
            if left[number] <= _NOTHING_LEFT * max(1.0, tasks[number].seconds):
                ended.append(number)
        for number in ended:
            running.discard(number)
            ends[number] = now
            for follower in followers[number]:
                open_befores[follower] -= 1
                if open_befores[follower] == 0:
                    starts[follower] = now
                    running.add(follower)
    return Schedule(tasks=tuple(tasks), starts=tuple(starts), ends=tuple(ends))


def _dependencies(tasks: Sequence[Task]) -> list[set[int]]:
    """Of each task those that it waits for: the last one of each of its ranks, and `after`."""
    last: dict[int, int] = {}
    found = []
    for number, task in enumerate(tasks):
        assert all(0 <= before < number for before in task.after), f"{task} waits for a later one"
        found.append({last[rank] for rank in task.ranks if rank in last} | set(task.after))
        last.update(dict.fromkeys(task.ranks, number))
    return found


def _demand(task: Task, *, node_of: Callable[[int], int]) -> dict[int, float]:
    """Node -> cores that the task would keep busy."""
    demand: dict[int, float] = {}
    for rank in task.ranks:
        node = node_of(rank)
        demand[node] = demand.get(node, 0.0) + task.busy_share
    return demand


def _speeds(
    running: set[int], *, demands: Sequence[dict[int, float]], cores_per_node: float | None
) -> dict[int, float]:
    """Task -> its speed, 1 with cores for all; a task on several nodes goes with the slowest."""
    if cores_per_node is None:
        return dict.fromkeys(running, 1.0)
    total: dict[int, float] = {}
    for number in running:
        for node, demand in demands[number].items():
            total[node] = total.get(node, 0.0) + demand
    return {
        number: min(
            (min(1.0, cores_per_node / total[node]) for node, d in demands[number].items() if d),
            default=1.0,
        )
        for number in running
    }
