"""The rules of a configuration that span several keys, as pure functions that list the problems.

Every problem reads `key=value: rule; way out`. Bounds and choices of single keys are checked by
`loader`; rules that need the numbers of a model are in `validation_model`. Nothing here imports
torch, Megatron-Core or vLLM, so a bad configuration is refused before anything slow starts.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_megatron.config import Config, read_config
from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.faults_config import phase_limit, refused_phase_limits
from rlhf_megatron.layout.parallel import DIMENSIONS, parse_ranks
from rlhf_megatron.layout.remote_code import refused_code
from rlhf_megatron.loader import show
from rlhf_megatron.models.config import OptimizerConfig, RecomputeConfig
from rlhf_megatron.observability.config import refused_profile, refused_trace_steps
from rlhf_megatron.placement_config import placed_by, ranks_key
from rlhf_megatron.rewards.config import refused_reward
from rlhf_megatron.rollout.config import refused_engine_args
from rlhf_megatron.shared_backbone import refused_shared_backbone, trained_roles
from rlhf_megatron.validation_placement import placement_problems, ranks_problem
from rlhf_megatron.validation_precision import precision_problems

NOT_SUPPORTED_YET = {
    "context_parallel_size": "context parallelism is",
    "expert_model_parallel_size": "expert parallelism is",
}

METRICS_FILE = "metrics.jsonl"


def holds_a_run(folder: Path) -> bool:
    """Whether steps were written there; a run that failed before its first step does not count."""
    metrics = folder / METRICS_FILE
    return metrics.exists() and metrics.stat().st_size > 0


def is_restart() -> bool:
    """Whether the launcher or the scheduler has started this very job before."""
    return any(
        os.environ.get(name, "0") not in ("", "0")
        for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def goes_on_in(folder: Path, *, resume: str) -> bool:
    """Whether a run in `folder` is gone on with, not begun; `resume` is checkpoint.resume."""
    checkpoints = folder / "checkpoints"
    if resume == "never":
        return False
    if resume == "auto" or is_restart():
        return (checkpoints / "latest").exists()
    return checkpoints.resolve() in (Path(resume).resolve(), *Path(resume).resolve().parents)


def load_and_validate(
    paths: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    world_size: int,
    check_paths: bool = True,
    check_output: bool = True,
) -> Config:
    """Load, apply every rule that needs no model, and report all problems in one ConfigError."""
    loaded = read_config(paths, overrides=overrides)
    found = validate(loaded.config, world_size=world_size) if loaded.all_read else []
    if check_paths and loaded.all_read:
        found += validate_paths(loaded.config, check_output=check_output)
    # A key that could not be read holds its default: what follows from that is no news.
    problems = loaded.problems + [
        problem for problem in found if not any(_names(problem, key=k) for k in loaded.faulty_keys)
    ]
    if problems:
        raise ConfigError([loaded.secrets.hide(problem) for problem in problems])
    return loaded.config


def validate(config: Config, *, world_size: int) -> list[str]:
    """Every rule between keys, for `world_size` processes. An empty list: all is well."""
    problems = [
        *_required(config),
        *placement_problems(config, world_size=world_size),
        *_roles(config, world_size=world_size),
    ]
    trained = trained_roles(config)
    # Without the actor's ranks, "all" of the rollout has no meaning.
    if not any(p.startswith(f"{ranks_key(config, role='actor')}=") for p in problems):
        problems += _rollout_placement(config, world_size=world_size)
    problems += [
        *_sampling(config),
        *_ppo(config),
        *(p for n, role in trained.items() for p in _optimizer(role.optimizer, role=n)),
        *(p for n, role in trained.items() for p in _recompute(role.recompute, role=n)),
        *refused_shared_backbone(config),
        *_reward(config),
        *refused_phase_limits(
            config.faults.phase_limits, timeout_seconds=config.distributed.timeout_seconds
        ),
        *refused_trace_steps(config.logging),
        *refused_profile(config.profile, world_size=world_size),
    ]
    return problems


def validate_paths(config: Config, *, check_output: bool = True) -> list[str]:
    """Files and folders that the configuration names. Relative paths start at the working folder.

    `check_output` also refuses a folder that already holds a run. Call it before any rank writes
    there.
    """
    problems: list[str] = []
    for key, path in (
        ("actor.model", config.actor.model),
        ("critic.model", config.critic.model),
        ("ref.model", config.ref.model),
        ("reward.model", config.reward.model),
    ):
        problems += _model_directory(key, path=path)
        problems += _code(config, key=key, path=path)
    for key, path in (
        ("data.prompts", config.data.prompts),
        ("evaluation.prompts", config.evaluation.prompts),
        ("warmup.demonstrations", config.warmup.demonstrations),
    ):
        if path and not Path(path).is_file():
            problems.append(f"{key}={path}: no such file; give a JSONL or Parquet file")
    tokenizer = config.data.tokenizer
    if tokenizer and not Path(tokenizer).exists():
        problems.append(
            f"data.tokenizer={tokenizer}: no such file or directory; give a Hugging Face directory "
            "or a sentencepiece .model file, or leave it empty to take actor.model"
        )
    problems += _code(config, key="data.tokenizer", path=tokenizer)
    file, colon, _ = config.reward.function.rpartition(":")
    if colon and file.endswith(".py") and not Path(file).is_file():
        problems.append(
            f"reward.function={config.reward.function}: no such file as {file}; "
            "give path/to/file.py:name"
        )
    problems += _resume_path(config)
    if check_output and config.run.output_dir:
        problems += _output(config)
    return problems


def _names(problem: str, *, key: str) -> bool:
    """Whether the problem is about the key or section."""
    return any(word == key or word.startswith(f"{key}.") for word in re.findall(r"[\w.]+", problem))


def _output(config: Config) -> Iterator[str]:
    folder = Path(config.run.output_dir)
    if folder.exists() and not folder.is_dir():
        yield f"run.output_dir={folder}: is a file; give a folder"
    elif (
        holds_a_run(folder)
        and not config.run.overwrite
        and not is_restart()  # then it is this job's own run
        and not goes_on_in(folder, resume=config.checkpoint.resume)
    ):
        never = config.checkpoint.resume == "never"
        yield (
            f"run.output_dir={folder}: already holds a run; give another folder, or set "
            "run.overwrite=true to move that run aside"
            + ("" if never else " (it has no checkpoint to go on from)")
        )


def _resume_path(config: Config) -> Iterator[str]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield (
            f"checkpoint.resume={resume}: no such folder; give auto, never, or a checkpoint such "
            "as RUN/checkpoints/step_000010"
        )


def _model_directory(key: str, *, path: str) -> Iterator[str]:
    if not path:
        return
    if not Path(path).is_dir():
        yield f"{key}={path}: no such directory; give a Hugging Face model directory"
    elif not (Path(path) / "config.json").is_file():
        yield (
            f"{key}={path}: holds no config.json; give a Hugging Face model directory "
            "(config.json and *.safetensors)"
        )


def _code(config: Config, *, key: str, path: str) -> list[str]:
    part = config.reward if key == "reward.model" else config.run
    trust_key = f"{'reward' if part is config.reward else 'run'}.trust_remote_code"
    return refused_code(path, key=key, trusted=part.trust_remote_code, trust_key=trust_key)


def _required(config: Config) -> Iterator[str]:
    for key, value, what in (
        ("run.output_dir", config.run.output_dir, "the folder that the run writes to"),
        ("actor.model", config.actor.model, "the Hugging Face directory of the starting weights"),
        ("data.prompts", config.data.prompts, "a JSONL or Parquet file of prompts"),
    ):
        if not value:
            yield f"{key}=: required and not set; give {what}"


def _roles(config: Config, *, world_size: int) -> Iterator[str]:
    placed = placed_by(config)
    roles = [
        ("actor", config.actor.parallel),
        ("reward", config.reward.parallel),
    ]
    if not config.critic.shared_backbone:
        roles.append(("critic", config.critic.parallel))
    if config.ppo.kl.place != "off":  # otherwise there is no reference
        roles.append(("ref", config.ref.parallel))
    for role, parallel in roles:
        yield from _parallel(parallel, role=role, world_size=world_size, is_placed=role in placed)
    yield from precision_problems(config)


def _parallel(
    parallel: ParallelConfig, *, role: str, world_size: int, is_placed: bool
) -> Iterator[str]:
    """Rules of one role's layout. is_placed: `placement` names the role, and its ranks have been
    looked at there."""
    at = f"{role}.parallel"
    for name, what in NOT_SUPPORTED_YET.items():
        if getattr(parallel, name) > 1:
            yield f"{at}.{name}={getattr(parallel, name)}: {what} not supported yet; set 1"
    if sorted(parallel.grid_order.split("-")) != sorted(DIMENSIONS):
        yield (
            f"{at}.grid_order={parallel.grid_order}: must be a permutation of tp, dp and pp joined "
            "by '-'; take tp-dp-pp"
        )
    tensor = parallel.tensor_model_parallel_size
    pipeline = parallel.pipeline_model_parallel_size
    if parallel.sequence_parallel and tensor == 1:
        yield (
            f"{at}.sequence_parallel=true: needs tensor_model_parallel_size > 1, which is 1; set "
            "it to false or raise the tensor-parallel size"
        )
    virtual = parallel.virtual_pipeline_model_parallel_size
    if virtual > 1 and pipeline == 1:
        yield (
            f"{at}.virtual_pipeline_model_parallel_size={virtual}: needs "
            "pipeline_model_parallel_size > 1, which is 1; set 1, or raise the pipeline size"
        )
    if role == "reward" and tensor * pipeline > 1:
        yield (
            f"{at}.tensor_model_parallel_size={tensor}, pipeline_model_parallel_size={pipeline}: "
            "a reward model is held whole on each rank; set both to 1"
        )
        return
    problem = ranks_problem(parallel.ranks, key=f"{at}.ranks", world_size=world_size)
    if problem:
        if not is_placed:
            yield problem
        return
    ranks = parse_ranks(parallel.ranks, default=range(world_size))
    of = "of the world" if len(ranks) == world_size else f"of the role (ranks {parallel.ranks})"
    yield from _sizes(parallel, at=at, num_ranks=len(ranks), of=of)


def _sizes(parallel: ParallelConfig, *, at: str, num_ranks: int, of: str) -> Iterator[str]:
    tensor = parallel.tensor_model_parallel_size
    pipeline = parallel.pipeline_model_parallel_size
    data = parallel.data_parallel_size
    model = tensor * pipeline
    if num_ranks % model:
        yield (
            f"{at}.tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={pipeline}: "
            f"their product {model} must divide the {num_ranks} ranks {of}; give it a "
            f"multiple of {model} ranks, or take a product out of {_divisors_text(num_ranks)}"
        )
    elif data and data != num_ranks // model:
        yield (
            f"{at}.data_parallel_size={data}: tensor {tensor} x pipeline {pipeline} x data {data} "
            f"must give exactly the {num_ranks} ranks {of}; set {num_ranks // model}, or 0 to take "
            f"what the ranks allow, or give it {model * data} ranks"
        )


def _rollout_placement(config: Config, *, world_size: int) -> Iterator[str]:
    rollout = config.rollout
    tensor = rollout.tensor_parallel_size
    if rollout.engine == "hf" and tensor != 1:
        yield (
            f"rollout.tensor_parallel_size={tensor}: the hf engine holds a model whole; set 1, or "
            "take rollout.engine=vllm"
        )
    problem = ranks_problem(rollout.ranks, key="rollout.ranks", world_size=world_size)
    if problem:
        if "rollout" not in placed_by(config):
            yield problem
        return
    actor = parse_ranks(config.actor.parallel.ranks, default=range(world_size))
    ranks = parse_ranks(rollout.ranks, default=actor)
    if rollout.engines != "auto":
        yield from _engines(config, ranks=ranks)
    elif len(ranks) % tensor:
        yield (
            f"rollout.tensor_parallel_size={tensor}: must divide the {len(ranks)} rollout ranks; "
            f"take {_divisors_text(len(ranks))}, or other rollout.ranks"
        )


def _engines(config: Config, *, ranks: Sequence[int]) -> Iterator[str]:
    """Rules of an explicit list of engines, such as 0,2;1,3."""
    text, size = config.rollout.engines, config.rollout.tensor_parallel_size
    at = f"rollout.engines={text}"
    used: list[int] = []
    for part in text.split(";"):
        try:
            engine = parse_ranks("" if part.strip() == "all" else part, default=())
        except ValueError:
            yield (
                f"{at}: '{part}' is not an ascending list of ranks, and an engine with permuted "
                "ranks generates garbage; write one list an engine, like 0,2;1,3, or auto"
            )
            continue
        if len(engine) != size:
            yield (
                f"{at}: '{part}' has {len(engine)} ranks, but rollout.tensor_parallel_size={size}; "
                f"list {size} ranks for each engine"
            )
        outside = sorted(set(engine) - set(ranks))
        if outside:
            yield (
                f"{at}: rank {outside[0]} of '{part}' is not among the rollout ranks "
                f"(rollout.ranks={config.rollout.ranks}, {len(ranks)} ranks); list only those"
            )
        used += engine
    twice = sorted({rank for rank in used if used.count(rank) > 1})
    if twice:
        yield f"{at}: rank {twice[0]} is in two engines; give each rank to one engine at most"


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    reason = "makes the sampled distribution differ from the trained one"
    if rollout.top_p != 1:
        yield f"rollout.top_p={rollout.top_p}: a cut tail {reason}; set 1"
    if rollout.top_k != -1:
        yield f"rollout.top_k={rollout.top_k}: a cut tail {reason}; set -1 (off)"
    if any(token < 0 for token in rollout.stop_token_ids):
        yield f"rollout.stop_token_ids={rollout.stop_token_ids}: must be 0 or above; remove others"
    yield from refused_engine_args(rollout.engine_args)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    batched = rollout.max_num_batched_tokens
    if not rollout.enable_chunked_prefill and 0 < batched < longest:
        yield (
            f"rollout.max_num_batched_tokens={batched}: without rollout.enable_chunked_prefill it "
            f"must hold a whole prompt and response, {longest} tokens; set {longest} or 0, or "
            "rollout.enable_chunked_prefill=true"
        )
    if not all(rollout.stop_tokens):
        yield f"rollout.stop_tokens={rollout.stop_tokens}: holds an empty text; remove it"
    if config.reshard.interval > 1 and rollout.sleep_level == 2:
        yield (
            f"rollout.sleep_level=2: drops the engine's weights, which reshard.interval="
            f"{config.reshard.interval} writes only every {config.reshard.interval} steps; set "
            "rollout.sleep_level=1, or reshard.interval=1"
        )
    warmup = config.warmup
    if warmup.steps and not warmup.demonstrations:
        yield (
            f"warmup.steps={warmup.steps}: needs warmup.demonstrations, which is not set; give a "
            "JSONL or Parquet file, or set warmup.steps=0"
        )


def _ppo(config: Config) -> Iterator[str]:
    ppo, rollout = config.ppo, config.rollout
    samples = rollout.prompts_per_step * rollout.responses_per_prompt
    arithmetic = f"{rollout.prompts_per_step} prompts x {rollout.responses_per_prompt} responses"
    if samples % ppo.mini_batch_samples:
        yield (
            f"ppo.mini_batch_samples={ppo.mini_batch_samples}: must divide the {samples} "
            f"samples of a step ({arithmetic}); take {_divisors_text(samples)}"
        )
    if 0 < ppo.dual_clip <= 1:
        yield f"ppo.dual_clip={ppo.dual_clip}: must be 0 (off) or above 1; take 3, or 0"
    cap = ppo.importance_sampling.cap
    if 0 < cap < 1:
        yield (
            f"ppo.importance_sampling.cap={cap}: must be 0 (off) or at least 1, since a token on "
            "policy weighs 1; take 2, or 0"
        )
    kl = ppo.kl
    if kl.place == "reward" and kl.estimator != "k1":
        yield (
            f"ppo.kl.estimator={kl.estimator}: ppo.kl.place=reward takes k1 only; set "
            "ppo.kl.estimator=k1, or ppo.kl.place=loss"
        )
    if kl.place == "loss" and kl.estimator == "k1":
        yield (
            "ppo.kl.estimator=k1: its gradient vanishes on average, so ppo.kl.place=loss takes k2 "
            "or k3 only; set ppo.kl.estimator=k2 or k3, or ppo.kl.place=reward"
        )
    if kl.adaptive and (kl.place == "off" or kl.coefficient == 0):
        yield (
            f"ppo.kl.adaptive=true: has nothing to adapt with ppo.kl.place={kl.place} and "
            f"ppo.kl.coefficient={show(kl.coefficient)}; set it to false, or a place and a "
            "coefficient above 0"
        )


def _optimizer(optimizer: OptimizerConfig, *, role: str) -> Iterator[str]:
    at = f"{role}.optimizer"
    if optimizer.minimum_learning_rate > optimizer.learning_rate:
        yield (
            f"{at}.minimum_learning_rate={optimizer.minimum_learning_rate}: must be at most "
            f"learning_rate={optimizer.learning_rate}; lower it, or set 0"
        )
    if optimizer.overlap_param_gather and not optimizer.overlap_grad_reduce:
        yield (
            f"{at}.overlap_param_gather=true: weights are gathered in the buckets of "
            f"overlap_grad_reduce, which is false; set {at}.overlap_grad_reduce=true as well, or "
            "overlap_param_gather to false"
        )
    for name in ("beta1", "beta2"):
        if getattr(optimizer, name) >= 1:
            yield f"{at}.{name}={getattr(optimizer, name)}: must be below 1; take 0.9 to 0.999"


def _recompute(recompute: RecomputeConfig, *, role: str) -> Iterator[str]:
    if recompute.num_layers and recompute.granularity != "full":
        yield (
            f"{role}.recompute.num_layers={recompute.num_layers}: counts whole layers, and "
            f"{role}.recompute.granularity={recompute.granularity}; set granularity=full, or 0"
        )


def _reward(config: Config) -> list[str]:
    limit = phase_limit(config.faults, phase="reward")
    return refused_reward(config.reward, phase_limit_seconds=limit.seconds, limit_key=limit.key)


def _divisors_text(number: int) -> str:
    return listed([d for d in range(1, number + 1) if number % d == 0])


def listed(numbers: Sequence[int]) -> str:
    """ "1, 2, 4 or 8"; the middle of a long list is left out."""
    shown = [str(n) for n in numbers]
    if len(shown) > 10:
        shown = [*shown[:5], "...", *shown[-3:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
