"""The simulator: schedules by hand, properties of the costs, planted rates, the command line."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tools_data import tool

from rlhf_megatron.config import Config, read_config
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.memory.plan import RoleModels
from rlhf_megatron.simulator.calibrate import calibrate, least_squares
from rlhf_megatron.simulator.candidates import candidates, fitted, overrides
from rlhf_megatron.simulator.cluster import Cluster, Rates, read_cluster, with_rates, write_cluster
from rlhf_megatron.simulator.costs import PhaseCost, phase_costs
from rlhf_megatron.simulator.measured import MeasuredPhase, MeasuredRun, read_run
from rlhf_megatron.simulator.schedule import Task, run_tasks
from rlhf_megatron.simulator.search import best_of_kinds, search
from rlhf_megatron.simulator.setup import Setup, Workload, make_setup, workload_of
from rlhf_megatron.simulator.steps import simulate

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs" / "models"
SMALL = read_architecture(MODELS / "Llama-3.2-1B")
LARGE = read_architecture(MODELS / "Llama-3.1-8B")
TINY = replace(
    SMALL, num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=128,
)  # fmt: skip
H100 = ROOT / "configs" / "clusters" / "h100_80gb.yaml"
CPU = ROOT / "configs" / "clusters" / "cpu_2_cores.yaml"
MODELS_8B = RoleModels(actor=LARGE, critic=SMALL, ref=LARGE)
MODELS_TINY = RoleModels(actor=TINY, critic=TINY, ref=TINY)
SPLIT = {
    "actor.parallel.ranks": "0-3",
    "ref.parallel.ranks": "0-3",
    "rollout.ranks": "0-3",
    "critic.parallel.ranks": "4-7",
}
SECONDS = {
    "rollout": 10.0,
    "reward": 1.0,
    "log_prob": 3.0,
    "ref_log_prob": 3.0,
    "value": 4.0,
    "advantage": 0.5,
    "update_critic": 8.0,
    "update_actor": 12.0,
    "reshard": 2.0,
    "exchange": 0.0,
    "sleep": 0.0,
}


def config_of(**keys: Any) -> Config:
    return _config(tuple(f"{key}={value}" for key, value in keys.items()))


@lru_cache(maxsize=64)
def _config(words: tuple[str, ...]) -> Config:
    loaded = read_config([str(ROOT / "configs" / "ppo_8b_8gpu.yaml")], overrides=words)
    assert loaded.problems == []
    return loaded.config


@lru_cache
def h100() -> Cluster:
    return read_cluster(H100)


def setup_of(
    *,
    world_size: int = 8,
    cluster: Cluster | None = None,
    depth: int = 0,
    workload: Workload | None = None,
    models: RoleModels = MODELS_8B,
    **keys: Any,
) -> Setup:
    values = {"rollout.tensor_parallel_size": 1}
    for role in ("actor", "critic", "ref"):
        values |= {
            f"{role}.parallel.tensor_model_parallel_size": 1,
            f"{role}.parallel.pipeline_model_parallel_size": 1,
            f"{role}.parallel.sequence_parallel": "false",
        }
    config = config_of(**(values | keys))
    return make_setup(
        config,
        models=models,
        cluster=cluster or h100(),
        world_size=world_size,
        workload=workload,
        depth=depth,
    )


def by_hand(**changes: float) -> dict[str, PhaseCost]:
    return {name: PhaseCost().plus(compute=s) for name, s in (SECONDS | changes).items()}


# Schedules.


def test_tasks_of_a_rank_follow_each_other_and_those_of_others_do_not_wait() -> None:
    found = run_tasks(
        [
            Task(name="a", step=1, ranks=(0,), seconds=3.0),
            Task(name="b", step=1, ranks=(1,), seconds=1.0),
            Task(name="c", step=1, ranks=(1,), seconds=1.0),
            Task(name="both", step=1, ranks=(0, 1), seconds=2.0),
            Task(name="after", step=1, ranks=(2,), seconds=1.0, after=(2,)),
        ]
    )
    assert found.starts == (0, 0, 1, 3, 2)
    assert found.ends == (3, 1, 2, 5, 3)
    assert found.idle_shares(since=0, until=5) == {
        0: 0.0,
        1: pytest.approx(0.2),
        2: pytest.approx(0.8),
    }


def test_ranks_that_share_cores_slow_each_other_down() -> None:
    tasks = [Task(name=str(r), step=1, ranks=(r,), seconds=2.0) for r in range(4)]
    tasks.append(Task(name="x", step=1, ranks=(0,), seconds=1.0))
    assert run_tasks(tasks, cores_per_node=2).ends == (4, 4, 4, 4, 5)
    of_nodes = run_tasks(tasks, cores_per_node=2, node_of=lambda rank: rank // 2)
    assert of_nodes.ends == (2, 2, 2, 2, 3)
    lazy = [replace(task, busy_share=0.5) for task in tasks]
    assert run_tasks(lazy, cores_per_node=2).ends == (2, 2, 2, 2, 3)


def test_colocated_roles_take_the_sum_of_their_phases() -> None:
    found = simulate(setup_of(), costs=by_hand())
    assert found.step_seconds == pytest.approx(10 + 1 + 3 + 3 + 4 + 0.5 + 8 + 12 + 2)
    assert found.idle_share == pytest.approx(0.0)


def test_split_roles_run_side_by_side_and_meet() -> None:
    found = simulate(setup_of(**SPLIT), costs=by_hand())
    # rollout, reward on all, log_prob + ref | value, advantage, the longer update with its reshard
    assert found.step_seconds == pytest.approx(10 + 1 + 6 + 0.5 + 14)
    assert found.idle_of("actor") == pytest.approx(0.0)
    assert found.idle_of("critic") == pytest.approx(1 - (1 + 4 + 0.5 + 8) / 31.5)
    assert found.idle_share == pytest.approx(found.idle_of("critic") / 2)


def test_with_depth_1_the_critic_is_updated_beside_the_rollout() -> None:
    found = simulate(setup_of(depth=1, **SPLIT), costs=by_hand())
    # advantage, rollout | update_critic, update_actor + log_probs + reshard | value, reward on all
    assert found.step_seconds == pytest.approx(0.5 + 10 + (12 + 3 + 3 + 2) + 1)
    long_critic = simulate(setup_of(depth=1, **SPLIT), costs=by_hand(update_critic=15, value=40))
    assert long_critic.step_seconds == pytest.approx(0.5 + 15 + 40 + 1)


def test_engines_on_ranks_of_their_own_wait_for_the_actor() -> None:
    keys = SPLIT | {"rollout.ranks": "4-7", "critic.parallel.ranks": "0-3"}
    found = simulate(setup_of(**keys), costs=by_hand())
    # The actor's ranks have the critic's phases too; the engines roll out and take weights.
    assert found.step_seconds == pytest.approx(10 + 1 + (3 + 3 + 4) + 0.5 + (8 + 12 + 2))
    assert found.idle_of("rollout") == pytest.approx(1 - (10 + 1 + 0.5 + 2) / 43.5)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(SECONDS)), st.floats(0.1, 50), st.sampled_from([0, 1]), st.booleans())
def test_a_longer_phase_never_makes_a_shorter_step(
    phase: str, more: float, depth: int, is_split: bool
) -> None:
    setup = setup_of(depth=depth, **(SPLIT if is_split else {}))
    before = simulate(setup, costs=by_hand()).step_seconds
    after = simulate(setup, costs=by_hand(**{phase: SECONDS[phase] + more})).step_seconds
    assert before - 1e-9 <= after <= before + 4 * more + 1e-9  # at most 4 meetings a step


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 5)), min_size=1, max_size=12))
def test_no_schedule_beats_its_cores(spans: list[tuple[int, float]]) -> None:
    tasks = [Task(name="t", step=1, ranks=(rank,), seconds=s) for rank, s in spans]
    end = run_tasks(tasks, cores_per_node=2).end
    total = sum(seconds for _, seconds in spans)
    of_rank = [sum(s for r, s in spans if r == rank) for rank in range(4)]
    assert end >= max(total / 2, *of_rank) - 1e-9
    assert end <= total + 1e-9


# Costs.


def test_the_bubble_is_that_of_1f1b_and_shrinks_with_virtual_stages() -> None:
    keys = {f"{role}.parallel.pipeline_model_parallel_size": 4 for role in ("actor", "critic")}
    one = phase_costs(setup_of(**keys))["update_actor"]
    two = phase_costs(
        setup_of(**keys, **{"actor.parallel.virtual_pipeline_model_parallel_size": 2})
    )["update_actor"]
    assert 0 < two.parts["bubble"] < 0.6 * one.parts["bubble"]
    assert "bubble" not in phase_costs(setup_of())["update_actor"].parts
    assert one.busy_seconds < one.seconds - one.parts["bubble"] + 1e-9


@pytest.mark.parametrize(
    ("rate", "phase"),
    [
        ("flops_per_second", "log_prob"),
        ("train_flops_per_second", "update_actor"),
        ("memory_bytes_per_second", "rollout"),
        ("reshard_bytes_per_second", "reshard"),
        ("inter_node_bytes_per_second", "exchange"),
    ],
)
def test_a_higher_rate_makes_its_phase_shorter(rate: str, phase: str) -> None:
    cluster = replace(read_cluster(H100), ranks_per_node=2)
    keys = {"actor.parallel.tensor_model_parallel_size": 2}
    keys |= {"rollout.ranks": "0-3", "actor.parallel.ranks": "4-7"}
    seconds = [
        phase_costs(
            setup_of(
                cluster=with_rates(cluster, **{rate: factor * getattr(cluster.rates, rate)}), **keys
            )
        )[phase].seconds
        for factor in (1.0, 2.0, 4.0)
    ]
    if phase != "reshard":  # between nodes the network limits it
        assert seconds[0] > seconds[1] > seconds[2]
    assert seconds == sorted(seconds, reverse=True)


@settings(max_examples=15, deadline=None)
@given(st.floats(10, 2000), st.floats(10, 2000), st.floats(1.1, 3))
def test_longer_samples_take_longer(prompt: float, response: float, factor: float) -> None:
    def step(scale: float) -> float:
        lengths = Workload(
            prompt_tokens=scale * prompt,
            response_tokens=scale * response,
            longest_response_tokens=scale * 2 * response,
        )
        return simulate(setup_of(workload=lengths)).step_seconds

    assert step(factor) > step(1.0)


def test_twice_the_replicas_halve_the_arithmetic() -> None:
    few, many = (phase_costs(setup_of(world_size=n))["update_actor"] for n in (8, 16))
    assert many.parts["compute"] == pytest.approx(few.parts["compute"] / 2)


# Calibration.


PLANTED = {
    "flops_per_second": 3.1e10,
    "train_flops_per_second": 1.2e10,
    "decode_step_seconds": 8e-3,
    "reshard_seconds": 2e-2,
    "step_seconds": 4e-2,
}
LENGTHS = Workload(prompt_tokens=200.0, response_tokens=300.0, longest_response_tokens=500.0)


def planted_run(setup: Setup, *, folder: Path = Path("run")) -> MeasuredRun:
    costs = phase_costs(setup)
    step = simulate(setup)
    return MeasuredRun(
        folder=folder,
        world_size=setup.world_size,
        num_steps=8,
        step_seconds=step.step_seconds,
        fastest_step_seconds=step.step_seconds,
        step_cpu_seconds=100.0 if setup.cluster.cores_per_node else 0.0,
        phases={
            name: MeasuredPhase(seconds=cost.seconds, cpu_seconds=cost.busy_seconds)
            for name, cost in costs.items()
        },
        workload=LENGTHS,
    )


@pytest.mark.parametrize("cores", [None, 2.0])
def test_planted_rates_are_recovered(cores: float | None) -> None:
    described = Cluster(
        name="planted",
        memory_gb=None,
        cores_per_node=cores,
        rates=Rates(
            flops_per_second=2e10,
            train_flops_per_second=2e10,
            decode_step_seconds=5e-3,
            reshard_seconds=1e-2,
            step_seconds=1e-2,
        ),
    )
    true = with_rates(described, **PLANTED)
    if cores is not None:  # of a machine that does something else beside
        true = replace(true, cores_per_node=1.4)
    measured = planted_run(
        setup_of(world_size=4, cluster=true, workload=LENGTHS, models=MODELS_TINY)
    )
    found = calibrate(
        setup_of(world_size=4, cluster=described, workload=LENGTHS, models=MODELS_TINY),
        run=measured,
    )
    for name, value in PLANTED.items():
        assert getattr(found.cluster.rates, name) == pytest.approx(value, rel=0.05), name
    assert found.step_seconds[0] == pytest.approx(found.step_seconds[1], rel=0.01)
    if cores is not None:
        assert found.cluster.cores_per_node == pytest.approx(1.4, rel=0.02)
    # And another placement is predicted as the true machine would run it.
    keys = {"actor.parallel.pipeline_model_parallel_size": 2}
    other, expected = (
        simulate(
            setup_of(world_size=4, cluster=cluster, workload=LENGTHS, models=MODELS_TINY, **keys)
        ).step_seconds
        for cluster in (found.cluster, true)
    )
    assert other == pytest.approx(expected, rel=0.05)


def test_least_squares_finds_the_minimum_of_a_curved_valley() -> None:
    import numpy as np

    def rosenbrock(x: Any) -> Any:
        return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])

    assert least_squares(rosenbrock, start=np.array([-1.2, 1.0])) == pytest.approx([1, 1], abs=1e-4)


def write_run(folder: Path, *, steps: int) -> None:
    """Two ranks; rank 1's rollout is 2 s, and a step has an evaluation and 1 s outside phases."""
    lines, at = [], 1_700_000_000.0
    for step in range(1, steps + 1):
        for rank in (0, 1):
            spans = [("rollout", 1.0 + rank, 0.5), ("evaluation_rollout", 4.0, 0.1)]
            spans.append(("step", 7.0, 1.0))
            for phase, seconds, cpu in spans:
                start = at + (0.0 if phase == "step" else 0.5)
                lines.append(
                    {
                        "step": step, "rank": rank, "phase": phase, "seconds": seconds,
                        "allocated_gb": 1.0, "reserved_gb": 1.0, "peak_gb": 1.0,
                        "start_unix_seconds": start, "cpu_seconds": cpu,
                    }
                )  # fmt: skip
        at += 10
    (folder / "rollouts").mkdir(parents=True)
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(1, steps + 1):
        rows = [{"prompt_tokens": 10, "response_tokens": n} for n in (4, 8)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)


def test_a_run_is_read_without_warm_up_and_evaluations(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=6)
    run = read_run(tmp_path / "run")
    assert (run.world_size, run.num_steps, run.step_seconds) == (2, 4, 3.0)
    assert run.phases["rollout"] == MeasuredPhase(seconds=2.0, cpu_seconds=0.5)
    assert run.phases["outside"].seconds == pytest.approx(2.0)
    assert run.phases["outside"].cpu_seconds == pytest.approx(0.4)
    assert run.workload == Workload(prompt_tokens=10, response_tokens=6, longest_response_tokens=8)
    write_run(tmp_path / "short", steps=4)
    with pytest.raises(UserError, match=r"2 steps after the 2 of warm-up.*run.steps=5 or more"):
        read_run(tmp_path / "short")


# Search.


def search_8b(**changes: Any) -> Any:
    recompute = {f"{role}.recompute.granularity": "full" for role in ("actor", "critic")}
    config = config_of(**recompute)
    options: dict[str, Any] = {
        "models": MODELS_8B,
        "cluster": replace(h100(), ranks_per_node=4),
        "world_size": 8,
        "workload": workload_of(config),
    }
    return config, search(config, **(options | changes))


def test_the_search_ranks_what_fits() -> None:
    config, found = search_8b()
    speeds = [placed.simulation.samples_per_second for placed in found.ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert all(placed.plan.fits for placed in found.ranked)
    kinds = list(best_of_kinds(found))
    assert len(kinds) == len(set(kinds)) >= 3 and kinds[0] == found.ranked[0].candidate.kind
    assert found.num_tried > found.no_room >= 0
    words = overrides(found.ranked[0].candidate, config=config, world_size=8)
    parallel = [word for word in words if ".parallel." in word]
    assert read_config([], overrides=parallel).problems == []


def test_the_bounds_drop_nothing_that_the_planner_would_take() -> None:
    """Of a GPU that hardly holds the model."""
    cluster = replace(read_cluster(H100), memory_gb=40.0)
    models, config = MODELS_8B, config_of()
    all_of_them = list(candidates(config, models=models, cluster=cluster, world_size=8))
    kept = [
        found
        for c in all_of_them
        if (found := fitted(c, config=config, models=models, cluster=cluster, world_size=8))
    ]
    assert 0 < len(kept) < len(all_of_them)
    assert all(0 < candidate.utilization <= 0.9 for candidate in kept)


def test_a_search_where_nothing_fits_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"--world-size 8: none of \d+ placements fits 10"):
        search_8b(cluster=replace(h100(), ranks_per_node=4, memory_gb=10.0))


# Descriptions and the command line.


@pytest.mark.parametrize("path", [H100, CPU], ids=lambda path: path.stem)
def test_descriptions_read_and_written_are_the_same(path: Path, tmp_path: Path) -> None:
    cluster = replace(read_cluster(path), phase_factors={"rollout": 1.1})
    write_cluster(cluster, path=tmp_path / "x.yaml")
    assert read_cluster(tmp_path / "x.yaml") == cluster


def run_tool(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    config = ["--config", str(ROOT / "configs" / "ppo_70b_64gpu.yaml")]
    code = tool("simulate").main([*config, *words])
    found = capsys.readouterr()
    return code, found.out + found.err


def test_the_tool_prints_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_tool(capsys, "--world-size", "64")
    assert code == 0 and "nothing measured" in text
    for phase in ("rollout", "ref_log_prob", "update_actor", "reshard"):
        assert f"\n  {phase} " in text
    code, text = run_tool(capsys, "--world-size", "64", "--json", "--response-tokens", "100")
    figures = json.loads(text)
    assert code == 0 and figures["idle_share"] == pytest.approx(0.0, abs=1e-6)
    assert figures["step_seconds"] > 0 and len(figures["phases"]) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "0"], "--world-size 0: must be 1 or more"),
        (["--world-size", "8", "--prompt-tokens", "-1"], "--prompt-tokens -1.0: must be 0"),
        (["--world-size", "8", "--cluster", "none.yaml"], "none.yaml: no such file; give"),
        (["--world-size", "64", "--calibrate", "none"], "none/ledger.jsonl: no such file; give"),
        (["--world-size", "64", "--save-cluster", "x"], "--save-cluster: needs --calibrate"),
        (["--world-size", "12"], "must give the 12 ranks of the role"),
        (["--world-size", "64", "actor.paralel.ranks=0"], "did you mean actor.parallel.ranks"),
    ],
)
def test_the_tool_refuses(capsys: Any, words: list[str], message: str) -> None:
    code, text = run_tool(capsys, *words)
    assert code == 2
    assert message in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rates: {flops_per_secnd: 1}", "did you mean rates.flops_per_second?"),
        ("rates: {flops_per_second: 0}", "rates.flops_per_second=0: must be above 0"),
        ("rates: {step_seconds: -1}", "rates.step_seconds=-1: must be a finite number"),
        ("rates: {flops_per_second: 4e14}", "write 4e14 as 4.0e+14"),
        ("ranks_per_node: null", "ranks_per_node=None: must be a finite number"),
        ("nodes: 3", "nodes: unknown key"),
        ("[1]", "must hold keys"),
        ("a: [", "not readable as YAML"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_cluster(path)
    assert message in str(error.value)
