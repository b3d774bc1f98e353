"""Names that a user may type for a key: its former name here, or what other trainers call it.

An unknown key is answered with the key that takes its place. Nothing is translated silently: the
meaning often differs in its unit, and the remark says so.
"""

from collections.abc import Collection
from dataclasses import dataclass

RENAMED = {
    "rollout.weights": "rollout.weight_update",
}
"""Former full key -> full key of today. A key that is renamed gets a line here, for good."""


@dataclass(frozen=True)
class Elsewhere:
    """What a name of another trainer is here."""

    trainers: str
    keys: tuple[str, ...]
    """Full keys that take its place; empty where nothing does."""
    remark: str = ""


@dataclass(frozen=True)
class Answer:
    """What is said about an unknown key."""

    text: str
    keys: tuple[str, ...]
    """The keys it is about."""


def _of(trainers: str, *keys: str, remark: str = "") -> Elsewhere:
    return Elsewhere(trainers, keys, remark)


_RATES = ("actor.optimizer.learning_rate", "critic.optimizer.learning_rate")
_CLIP = ("ppo.clip_ratio_low", "ppo.clip_ratio_high")
_TENSOR = ("actor.parallel.tensor_model_parallel_size",)
_PIPELINE = ("actor.parallel.pipeline_model_parallel_size",)
_RECOMPUTE = ("actor.recompute.granularity", "critic.recompute.granularity")
_OPTIMIZER = ("actor.offload_optimizer", "critic.offload_optimizer")
_BY_TOKENS = "micro-batches are packed by tokens"
_SAMPLES = "counts samples (responses) over all ranks"
_PROMPTS = "counts prompts"
_STARTED = "nodes and processes are those that torchrun or srun starts"

ELSEWHERE: dict[str, Elsewhere] = {
    # batches
    "batch_size": _of("TRL", "rollout.prompts_per_step", remark=_PROMPTS),
    "rollout_batch_size": _of("OpenRLHF", "rollout.prompts_per_step", remark=_PROMPTS),
    "num_rollout_samples": _of("NeMo-Aligner", "rollout.prompts_per_step", remark=_PROMPTS),
    "data.train_batch_size": _of("verl", "rollout.prompts_per_step", remark=_PROMPTS),
    "train_batch_size": _of("OpenRLHF", "ppo.mini_batch_samples", remark=_SAMPLES),
    "global_batch_size": _of("NeMo-Aligner", "ppo.mini_batch_samples", remark=_SAMPLES),
    "mini_batch_size": _of("TRL", "ppo.mini_batch_samples", remark=_SAMPLES),
    "num_mini_batches": _of("TRL", "ppo.mini_batch_samples", remark=_SAMPLES),
    "ppo_mini_batch_size": _of(
        "verl", "ppo.mini_batch_samples", remark="counts samples, where verl counts prompts"
    ),
    "per_device_train_batch_size": _of("TRL", "ppo.micro_batch_tokens", remark=_BY_TOKENS),
    "micro_batch_size": _of("NeMo-Aligner", "ppo.micro_batch_tokens", remark=_BY_TOKENS),
    "micro_train_batch_size": _of("OpenRLHF", "ppo.micro_batch_tokens", remark=_BY_TOKENS),
    "micro_rollout_batch_size": _of("OpenRLHF", "ppo.micro_batch_tokens", remark=_BY_TOKENS),
    "forward_micro_batch_size": _of("NeMo-Aligner", "ppo.micro_batch_tokens", remark=_BY_TOKENS),
    "ppo_micro_batch_size_per_gpu": _of("verl", "ppo.micro_batch_tokens", remark=_BY_TOKENS),
    "log_prob_micro_batch_size_per_gpu": _of("verl", "ppo.micro_batch_tokens", remark=_BY_TOKENS),
    "ppo_max_token_len_per_gpu": _of("verl", "ppo.micro_batch_tokens"),
    "train_max_tokens_per_gpu": _of("OpenRLHF", "ppo.micro_batch_tokens"),
    "gradient_accumulation_steps": _of(
        "TRL",
        "ppo.mini_batch_samples",
        "ppo.micro_batch_tokens",
        remark="the number of micro-batches follows from the two",
    ),
    "use_dynamic_bsz": _of("verl", "ppo.micro_batch_tokens", remark="packing is always on"),
    "packing_samples": _of("OpenRLHF", "ppo.micro_batch_tokens", remark="packing is always on"),
    # length of the run
    "total_episodes": _of("TRL", "run.steps", remark="counts PPO steps"),
    "num_episodes": _of("OpenRLHF", "run.steps", remark="counts PPO steps"),
    "total_epochs": _of("verl", "run.steps", remark="counts PPO steps"),
    "num_train_epochs": _of("TRL", "run.steps", remark="counts PPO steps"),
    "total_training_steps": _of("verl", "run.steps"),
    "max_steps": _of("TRL and NeMo-Aligner", "run.steps"),
    # sampling
    "n": _of("verl", "rollout.responses_per_prompt"),
    "n_samples_per_prompt": _of("OpenRLHF", "rollout.responses_per_prompt"),
    "num_generations": _of("TRL", "rollout.responses_per_prompt"),
    "response_length": _of("TRL and verl", "rollout.max_response_tokens"),
    "max_response_length": _of("verl", "rollout.max_response_tokens"),
    "max_new_tokens": _of("TRL", "rollout.max_response_tokens"),
    "max_completion_length": _of("TRL", "rollout.max_response_tokens"),
    "generate_max_len": _of("OpenRLHF", "rollout.max_response_tokens"),
    "max_length": _of("NeMo-Aligner", "rollout.max_response_tokens"),
    "prompt_length": _of("verl", "rollout.max_prompt_tokens"),
    "max_prompt_length": _of("TRL and verl", "rollout.max_prompt_tokens"),
    "prompt_max_len": _of("OpenRLHF", "rollout.max_prompt_tokens"),
    "max_len": _of("OpenRLHF", "rollout.max_prompt_tokens", "rollout.max_response_tokens"),
    "max_model_len": _of("vLLM", "rollout.max_prompt_tokens", "rollout.max_response_tokens"),
    "end_strings": _of("NeMo-Aligner", "rollout.stop_tokens"),
    "stop_token": _of("TRL", "rollout.stop_tokens"),
    "stop_token_id": _of("TRL", "rollout.stop_token_ids"),
    # engines
    "vllm_tensor_parallel_size": _of("OpenRLHF", "rollout.tensor_parallel_size"),
    "vllm_num_engines": _of(
        "OpenRLHF", "rollout.engines", remark="auto makes as many as the ranks fill"
    ),
    "vllm_gpu_memory_utilization": _of("OpenRLHF", "rollout.gpu_memory_utilization"),
    "vllm_enable_sleep": _of("OpenRLHF", "rollout.sleep_level"),
    "free_cache_engine": _of("verl", "rollout.sleep_level"),
    "use_vllm": _of("TRL", "rollout.engine", remark="vllm or hf"),
    "enable_prefix_caching": _of("OpenRLHF", "rollout.engine_args"),
    "update_weights_bucket_megabytes": _of("verl", "reshard.bucket_mb"),
    # PPO
    "ppo_epochs": _of("TRL and verl", "ppo.epochs"),
    "num_ppo_epochs": _of("TRL", "ppo.epochs"),
    "max_epochs": _of("OpenRLHF", "ppo.epochs"),
    "discount_factor": _of("NeMo-Aligner", "ppo.gamma"),
    "lam": _of("TRL and verl", "ppo.gae_lambda"),
    "lambd": _of("OpenRLHF", "ppo.gae_lambda"),
    "normalize_advantages": _of("NeMo-Aligner", "ppo.whiten_advantages"),
    "whiten_rewards": _of("TRL", "ppo.whiten_advantages", remark="advantages, not rewards"),
    "clip_ratio": _of("verl", *_CLIP),
    "clip_eps": _of("PPO papers", *_CLIP),
    "epsilon_high": _of("TRL", "ppo.clip_ratio_high"),
    "cliprange": _of("TRL", *_CLIP),
    "eps_clip": _of("OpenRLHF", *_CLIP),
    "eps_clip_low_high": _of("OpenRLHF", *_CLIP),
    "ratio_eps": _of("NeMo-Aligner", *_CLIP),
    "clip_ratio_c": _of("verl", "ppo.dual_clip"),
    "cliprange_value": _of("TRL and verl", "ppo.value_clip"),
    "entropy_coeff": _of("verl", "ppo.entropy_coefficient"),
    "entropy_loss_coef": _of("OpenRLHF", "ppo.entropy_coefficient"),
    "entropy_bonus": _of("NeMo-Aligner", "ppo.entropy_coefficient"),
    "loss_agg_mode": _of("verl", "ppo.aggregation"),
    "vf_coef": _of(
        "TRL",
        "critic.shared_loss_weight",
        "critic.optimizer.learning_rate",
        remark="a critic that is a model of its own has no weight but its rate",
    ),
    "critic_warmup": _of("verl", "ppo.critic_warmup_steps"),
    "freezing_actor_steps": _of("OpenRLHF", "ppo.critic_warmup_steps"),
    "missing_eos_penalty": _of("TRL", "ppo.truncated", "ppo.truncation_penalty"),
    "reward_clip_range": _of("OpenRLHF", "ppo.reward_clip", remark="one bound for both sides"),
    "score_clip": _of("TRL", "ppo.reward_clip"),
    "tis_imp_ratio_cap": _of("verl", "ppo.importance_sampling.cap"),
    # KL
    "kl_coef": _of("TRL and verl", "ppo.kl.coefficient"),
    "init_kl_coef": _of("TRL and OpenRLHF", "ppo.kl.coefficient"),
    "initial_policy_kl_penalty": _of("NeMo-Aligner", "ppo.kl.coefficient"),
    "kl_loss_coef": _of("verl", "ppo.kl.coefficient", "ppo.kl.place", remark="place=loss"),
    "use_kl_loss": _of("verl and OpenRLHF", "ppo.kl.place", remark="place=loss"),
    "use_kl_in_reward": _of("verl", "ppo.kl.place", remark="place=reward"),
    "kl_loss_type": _of("verl", "ppo.kl.estimator"),
    "kl_penalty": _of("TRL and verl", "ppo.kl.estimator"),
    "kl_estimator": _of("TRL and OpenRLHF", "ppo.kl.estimator"),
    "kl_target": _of("OpenRLHF", "ppo.kl.target", "ppo.kl.adaptive"),
    "adap_kl_ctrl": _of("TRL", "ppo.kl.adaptive"),
    "kl_horizon": _of("OpenRLHF", "ppo.kl.horizon_samples"),
    "horizon": _of("TRL and verl", "ppo.kl.horizon_samples"),
    # models
    "model_name_or_path": _of("TRL", "actor.model"),
    "sft_model_path": _of("TRL", "actor.model"),
    "pretrain": _of("OpenRLHF", "actor.model"),
    "restore_from_path": _of("NeMo-Aligner", "actor.model"),
    "actor_rollout_ref.model.path": _of("verl", "actor.model"),
    "critic_pretrain": _of("OpenRLHF", "critic.model"),
    "ref_model": _of("TRL", "ref.model"),
    "reward_pretrain": _of("OpenRLHF", "reward.model"),
    "reward_model_path": _of("TRL", "reward.model"),
    "reward_model": _of("TRL", "reward.model"),
    "reward_model.model.path": _of("verl", "reward.model"),
    "custom_reward_function": _of("verl", "reward.function", remark="FILE.py:NAME"),
    "ref_reward_offload": _of("OpenRLHF", "ref.offload"),
    "gradient_checkpointing": _of("TRL and OpenRLHF", *_RECOMPUTE),
    "enable_gradient_checkpointing": _of("verl", *_RECOMPUTE),
    "activations_checkpoint_granularity": _of("NeMo", *_RECOMPUTE),
    "recompute_granularity": _of("Megatron-LM", *_RECOMPUTE),
    "adam_offload": _of("OpenRLHF", *_OPTIMIZER),
    "offload_adam_states": _of("NeMo-Aligner", *_OPTIMIZER),
    "optimizer_offload": _of("verl", *_OPTIMIZER),
    "grad_offload": _of("verl", "actor.offload_gradients", "critic.offload_gradients"),
    "param_offload": _of("verl", "actor.offload_weights", "critic.offload_weights", "ref.offload"),
    "remote_rm_url": _of("OpenRLHF", "reward.remote.endpoints", remark="a list of addresses"),
    "bf16": _of("TRL and Megatron-LM", "actor.precision"),
    "dtype": _of("verl", "actor.precision"),
    # optimizer
    "lr": _of("verl and Megatron-LM", *_RATES),
    "actor_learning_rate": _of("OpenRLHF", _RATES[0]),
    "critic_learning_rate": _of("OpenRLHF", _RATES[1]),
    "min_lr": _of("Megatron-LM", "actor.optimizer.minimum_learning_rate"),
    "lr_scheduler": _of("OpenRLHF", "actor.optimizer.schedule"),
    "lr_scheduler_type": _of("TRL", "actor.optimizer.schedule"),
    "lr_decay_style": _of("Megatron-LM", "actor.optimizer.schedule"),
    "lr_warmup_ratio": _of("OpenRLHF", "actor.optimizer.warmup_steps", remark="counts steps"),
    "warmup_ratio": _of("TRL", "actor.optimizer.warmup_steps", remark="counts steps"),
    "lr_warmup_steps": _of("verl", "actor.optimizer.warmup_steps"),
    "max_grad_norm": _of("TRL", "actor.optimizer.clip_grad", "critic.optimizer.clip_grad"),
    "max_norm": _of("OpenRLHF", "actor.optimizer.clip_grad", "critic.optimizer.clip_grad"),
    "gradient_clip_val": _of("NeMo-Aligner", "actor.optimizer.clip_grad"),
    "l2": _of("OpenRLHF", "actor.optimizer.weight_decay"),
    "adam_betas": _of("OpenRLHF", "actor.optimizer.beta1", "actor.optimizer.beta2"),
    # layouts
    "tp": _of("NeMo-RL", *_TENSOR, "rollout.tensor_parallel_size"),
    "tp_size": _of("many", *_TENSOR, "rollout.tensor_parallel_size"),
    "pp": _of("NeMo-RL", *_PIPELINE),
    "pp_size": _of("many", *_PIPELINE),
    "dp_size": _of("many", "actor.parallel.data_parallel_size"),
    "ds_tensor_parallel_size": _of("OpenRLHF", *_TENSOR),
    "ring_attn_size": _of("OpenRLHF", "actor.parallel.context_parallel_size"),
    "nnodes": _of("verl", remark=_STARTED),
    "num_nodes": _of("NeMo-Aligner", remark=_STARTED),
    "n_gpus_per_node": _of("verl", remark=_STARTED),
    "devices": _of("NeMo-Aligner", remark=_STARTED),
    # data and evaluation
    "dataset_name": _of("TRL", "data.prompts", remark="a JSONL or Parquet file"),
    "train_files": _of("verl", "data.prompts", remark="a JSONL or Parquet file"),
    "prompt_data": _of("OpenRLHF", "data.prompts", remark="a JSONL or Parquet file"),
    "data_prefix": _of("NeMo-Aligner", "data.prompts", remark="a JSONL or Parquet file"),
    "val_files": _of("verl", "evaluation.prompts"),
    "eval_dataset": _of("OpenRLHF", "evaluation.prompts"),
    "prompt_key": _of("verl", "data.prompt_field"),
    "input_key": _of("OpenRLHF", "data.prompt_field"),
    "label_key": _of(
        "OpenRLHF", "reward.function", remark="it is given every other field of the row"
    ),
    "apply_chat_template": _of(
        "OpenRLHF", "data.prompt_field", remark="lists of messages go through the template"
    ),
    "filter_overlong_prompts": _of("verl", "data.long_prompts", remark="long_prompts=drop"),
    "test_freq": _of("verl", "evaluation.interval_steps"),
    "eval_steps": _of("TRL and OpenRLHF", "evaluation.interval_steps"),
    "val_check_interval": _of("NeMo-Aligner", "evaluation.interval_steps"),
    # files and logs
    "save_path": _of("OpenRLHF", "run.output_dir"),
    "default_local_dir": _of("verl", "run.output_dir"),
    "explicit_log_dir": _of("NeMo-Aligner", "run.output_dir"),
    "experiment_name": _of("verl", "run.name"),
    "exp_name": _of("TRL", "run.name"),
    "save_freq": _of("verl", "checkpoint.interval_steps"),
    "save_steps": _of("TRL and OpenRLHF", "checkpoint.interval_steps"),
    "save_interval": _of("NeMo-Aligner", "checkpoint.interval_steps"),
    "max_ckpt_num": _of("OpenRLHF", "checkpoint.keep_last"),
    "save_total_limit": _of("TRL", "checkpoint.keep_last"),
    "resume_mode": _of("verl", "checkpoint.resume"),
    "resume_from_checkpoint": _of("TRL and NeMo-Aligner", "checkpoint.resume"),
    "load_checkpoint": _of("OpenRLHF", "checkpoint.resume"),
    "use_wandb": _of("OpenRLHF", "logging.wandb.mode", remark="online, offline or off"),
    "log_with": _of("TRL", "logging.wandb.mode", "logging.tensorboard"),
    "report_to": _of("TRL", "logging.wandb.mode", "logging.tensorboard"),
    "wandb_project": _of("OpenRLHF", "logging.wandb.project"),
    "project_name": _of("verl", "logging.wandb.project"),
    "wandb_run_name": _of("OpenRLHF", "logging.wandb.name"),
}
"""Name elsewhere (the last part of a key, or all of it where the last part alone would not tell) ->
what it is here. The names are those of the projects' own configurations."""


def answer(key: str, *, own_endings: Collection[str] = ()) -> Answer | None:
    """The answer to an unknown key that is known from elsewhere, written with - or _; None if it is
    not. own_endings: last parts of keys that exist here, which a typing error is likelier to mean.
    """
    plain = key.strip().lstrip("-").replace("-", "_")
    if plain in RENAMED:
        now = RENAMED[plain]
        return Answer(f"it is now {now}; write that", (now,))
    *sections, ending = plain.split(".")
    found = ELSEWHERE.get(plain) or (None if ending in own_endings else ELSEWHERE.get(ending))
    if found is None:
        return None
    named = [k for k in found.keys if k.split(".")[0] in sections]  # critic.optim.lr: the critic's
    keys = tuple(named) or found.keys
    remark = f", {found.remark}" if found.remark else ""
    if not keys:
        return Answer(f"{found.trainers} has it; here {found.remark}", ())
    text = f"did you mean {' and '.join(keys)}? ({ending} of {found.trainers}{remark})"
    return Answer(text, keys)
