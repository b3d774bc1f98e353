"""Configurations that are refused, each for one reason, with what the one line has to say."""

GOOD = """
run: {output_dir: runs/x}
actor: {model: models/tiny}
data: {prompts: prompts.jsonl}
reward: {function: "rewards.py:score"}
"""
"""A sound configuration for 4 ranks."""

# Overrides on GOOD with 4 ranks, then what the one problem must say: key=value, rule, way out.
BAD: list[tuple[list[str], list[str]]] = [
    # single keys: unknown, type, bound, choice
    (["rollout.temprature=1"], ["rollout.temprature: unknown key", "mean rollout.temperature?"]),
    (["actr.model=x"], ["actr.model: unknown key", "did you mean actor.model?"]),
    (["learning_rate=1"], ["learning_rate: unknown key", ".learning_rate?"]),
    (["ppo.kl.coeficient=1"], ["ppo.kl.coeficient: unknown key", "mean ppo.kl.coefficient?"]),
    (["run.steps"], ["run.steps: an override has the form key.path=value", "run.steps=10"]),
    (["=3"], ["=3: an override has the form key.path=value"]),
    (["run.steps=many"], ["run.steps=many", "must be a whole number", "the default is 100"]),
    (["run.steps=1.5"], ["run.steps=1.5", "must be a whole number", "the default is 100"]),
    (["run.steps=true"], ["run.steps=true", "must be a whole number", "the default is 100"]),
    (["run.steps="], ["run.steps=null", "must be a whole number", "the default is 100"]),
    (["ppo.gamma=high"], ["ppo.gamma=high", "must be a number", "the default is 1.0"]),
    (["run.overwrite=perhaps"], ["run.overwrite=perhaps", "must be true or false", "false"]),
    (["rollout.stop_token_ids=[a]"], ["rollout.stop_token_ids=['a']", "whole numbers", "[1, 2]"]),
    (["rollout.stop_token_ids=7"], ["rollout.stop_token_ids=7", "a list", "such as [1, 2]"]),
    (["rollout.engine_args=7"], ["rollout.engine_args=7", "must be a mapping"]),
    (["run.steps.more=1"], ["run.steps: run.steps.more sets a key inside it", "whole number"]),
    (["actor.parallel=2"], ["actor.parallel=2", "is a section", "such as actor.parallel.tensor"]),
    (["ppo.epochs=[1"], ["ppo.epochs=[1", "not valid YAML", "quote it"]),
    (["run.steps=-1"], ["run.steps=-1", "must be at least 0", "the default is 100"]),
    (["ppo.gamma=1.5"], ["ppo.gamma=1.5", "at least 0 and at most 1", "the default is 1.0"]),
    (["rollout.temperature=0"], ["rollout.temperature=0", "above 0 and at most 2", "default is"]),
    (["ppo.gamma=.nan"], ["ppo.gamma=nan", "must be a finite number", "the default is 1.0"]),
    (["distributed.timeout_seconds=.inf"], ["timeout_seconds=inf", "finite", "default is 1800.0"]),
    (["ppo.kl.place=nowhere"], ["ppo.kl.place=nowhere", "one of reward, loss, off", "default"]),
    (["actor.precision=fp16"], ["actor.precision=fp16", "one of bf16, fp32", "default is bf16"]),
    (["run.seed=${oc.env:NO_SUCH_VARIABLE}"], ["run.seed=${oc.env:NO_", "not found", "set it"]),
    (["run.name=${run.nme}"], ["run.name=${run.nme}", "cannot be resolved", "plain value"]),
    (["run.name=${"], ["run.name=${", "must be text"]),
    (["run.name=???"], ["run.name=???", "missing", "set it"]),
    # required keys
    (["run.output_dir="], ["run.output_dir=", "required and not set", "give the folder"]),
    (["actor.model="], ["actor.model=", "required and not set", "give the Hugging Face"]),
    (["data.prompts="], ["data.prompts=", "required and not set", "give a JSONL"]),
    # layouts
    *[
        ([f"{role}.parallel.{key}=2"], [f"{role}.parallel.{key}=2", "not supported yet", "set 1"])
        for role in ("actor", "critic", "ref", "reward")
        for key in ("context_parallel_size", "expert_model_parallel_size")
    ],
    (
        ["critic.parallel.virtual_pipeline_model_parallel_size=2"],
        [
            "critic.parallel.virtual_pipeline_model_parallel_size=2",
            "needs pipeline_model_parallel_size > 1",
        ],
    ),
    (
        ["actor.parallel.tensor_model_parallel_size=3"],
        ["actor.parallel.tensor_model_parallel_size=3", "must divide the 4 ranks", "1, 2 or 4"],
    ),
    (
        ["critic.parallel.pipeline_model_parallel_size=8"],
        [
            "critic.parallel.",
            "pipeline_model_parallel_size=8",
            "divide the 4 ranks",
            "multiple of 8",
        ],
    ),
    (
        ["ref.parallel.data_parallel_size=3"],
        ["ref.parallel.data_parallel_size=3", "exactly the 4 ranks", "set 4, or 0"],
    ),
    (
        ["actor.parallel.grid_order=tp-pp"],
        ["actor.parallel.grid_order=tp-pp", "permutation of tp, dp and pp", "take tp-dp-pp"],
    ),
    (
        ["actor.parallel.sequence_parallel=true"],
        ["actor.parallel.sequence_parallel=true", "tensor_model_parallel_size > 1", "to false"],
    ),
    (["critic.parallel.ranks=3-x"], ["critic.parallel.ranks=3-x", "ascending list", "0-3,6"]),
    (["critic.parallel.ranks=2,1"], ["critic.parallel.ranks=2,1", "ascending list", "0-3,6"]),
    (
        ["actor.parallel.ranks=0-7"],
        ["actor.parallel.ranks=0-7", "rank 7", "from 0 to 3", "start 8"],
    ),
    (
        ["ref.parallel.ranks=0-2", "ref.parallel.tensor_model_parallel_size=2"],
        ["ref.parallel.tensor_model_parallel_size=2", "divide the 3 ranks of the role", "1 or 3"],
    ),
    # placement and pipeline
    (["placement=[3]"], ["placement=[3]", "a list of mappings", "such as"]),
    (
        ["placement=[{ranks: 0-1, role: [critic], roles: [critic]}]"],
        ["placement[0].role: unknown key", "has ranks and roles"],
    ),
    (
        ["placement=[{ranks: [0], roles: [critic]}]"],
        ["placement[0].ranks=[0]", "ascending list", "0-3,6"],
    ),
    (["placement=[{ranks: 0-1, roles: []}]"], ["placement[0].roles=[]", "must be a list of actor"]),
    (["placement=[{ranks: 0, roles: [judge]}]"], ["placement[0].roles: judge is no role", "ref"]),
    (
        ["placement=[{ranks: 0-1, roles: [ref]}, {ranks: 2-3, roles: [ref]}]"],
        ["placement[1].roles: ref is in placement[0] as well", "once"],
    ),
    (
        ["placement=[{ranks: 0-1, roles: [critic]}]", "critic.parallel.ranks=2-3"],
        ["critic.parallel.ranks=2-3", "placement[0] puts critic on ranks 0-1", "remove the other"],
    ),
    (
        ["placement=[{ranks: 0-5, roles: [critic, ref]}]"],
        ["placement[0].ranks=0-5", "rank 5 is outside the world of 4", "start 6"],
    ),
    (
        ["placement=[{ranks: 0-9, roles: [actor, rollout]}]"],
        ["placement[0].ranks=0-9", "rank 9 is outside the world of 4", "start 10"],
    ),
    (["pipeline.depth=2"], ["pipeline.depth=2", "at most 1"]),
    (
        ["pipeline.depth=1"],
        ["pipeline.depth=1", "ppo.importance_sampling.cap=0", "set ppo.importance_sampling.cap=2"],
    ),
    (
        ["pipeline.depth=1", "ppo.importance_sampling.cap=2", "reshard.interval=2"],
        ["pipeline.depth=1", "reshard.interval=2", "older than one step", "reshard.interval=1"],
    ),
    (
        ["reward.parallel.tensor_model_parallel_size=2"],
        ["reward.parallel.tensor_model_parallel_size=2", "held whole", "set both to 1"],
    ),
    (["critic.precision=fp32"], ["critic.precision=fp32", "actor.precision=bf16", "set critic."]),
    (["ref.precision=fp32"], ["ref.precision=fp32", "actor.precision=bf16", "set ref.precision"]),
    (
        ["distributed.device=cpu", "actor.layer_spec=transformer_engine"],
        ["actor.layer_spec=transformer_engine", "needs a GPU", "take local or auto"],
    ),
    (
        ["critic.fp8=true"],
        ["critic.fp8=true", "critic.layer_spec=auto", "set critic.layer_spec=transformer_engine"],
    ),
    (
        [
            *(f"{role}.precision=fp32" for role in ("actor", "critic", "ref")),
            "critic.fp8=true",
            "critic.layer_spec=transformer_engine",
        ],
        ["critic.fp8=true", "goes with precision bf16", "critic.precision=fp32"],
    ),
    (
        ["actor.fp8=true", "actor.layer_spec=transformer_engine"],
        ["ref.fp8=false", "actor.fp8=true", "would measure rounding", "set ref.fp8=true"],
    ),
    # rollout
    (
        ["rollout.tensor_parallel_size=3"],
        ["rollout.tensor_parallel_size=3", "must divide the 4 rollout ranks", "take 1, 2 or 4"],
    ),
    (
        ["rollout.tensor_parallel_size=2", "rollout.ranks=0-2"],
        ["rollout.tensor_parallel_size=2", "must divide the 3 rollout ranks", "take 1 or 3"],
    ),
    (
        ["rollout.engine=hf", "rollout.tensor_parallel_size=2"],
        ["rollout.tensor_parallel_size=2", "hf engine holds a model whole", "set 1"],
    ),
    (["rollout.ranks=4"], ["rollout.ranks=4", "outside the world of 4", "from 0 to 3"]),
    (["rollout.ranks=one"], ["rollout.ranks=one", "ascending list", "0-3,6"]),
    (["rollout.engines=0;x"], ["rollout.engines=0;x", "'x' is not an ascending", "or auto"]),
    (["rollout.engines=all"], ["rollout.engines=all", "is not an ascending", "or auto"]),
    (
        ["rollout.tensor_parallel_size=2", "rollout.engines=2,0;1,3"],
        ["rollout.engines=2,0;1,3", "'2,0'", "garbage", "0,2;1,3"],
    ),
    (
        ["rollout.tensor_parallel_size=2", "rollout.engines=0,2;1"],
        ["rollout.engines=0,2;1", "'1' has 1 ranks", "list 2 ranks"],
    ),
    (["rollout.engines=0;1;1"], ["rollout.engines=0;1;1", "rank 1 is in two engines", "at most"]),
    (
        ["rollout.ranks=0-1", "rollout.engines=0;2"],
        ["rollout.engines=0;2", "rank 2 of '2' is not among", "list only those"],
    ),
    (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "differ from the trained", "set 1"]),
    (["rollout.top_k=50"], ["rollout.top_k=50", "differ from the trained", "set -1"]),
    (["rollout.stop_token_ids=[-1]"], ["rollout.stop_token_ids=[-1]", "0 or above", "remove"]),
    (["rollout.stop_tokens=['']"], ["rollout.stop_tokens=['']", "empty text", "remove"]),
    (["warmup.steps=5"], ["warmup.steps=5", "needs warmup.demonstrations", "warmup.steps=0"]),
    # PPO
    (
        ["ppo.mini_batch_samples=48"],
        ["ppo.mini_batch_samples=48", "must divide the 64 samples", "64 prompts x 1", "32 or 64"],
    ),
    (
        ["ppo.mini_batch_samples=128"],
        ["ppo.mini_batch_samples=128", "must divide the 64 samples", "take 1, 2, 4"],
    ),
    (
        ["ppo.importance_sampling.cap=0.5"],
        ["ppo.importance_sampling.cap=0.5", "must be 0 (off) or at least 1", "take 2"],
    ),
    (
        ["reshard.interval=3", "rollout.sleep_level=2"],
        ["rollout.sleep_level=2", "only every 3 steps", "set rollout.sleep_level=1"],
    ),
    (
        ["rollout.engine_args={load_format: auto}"],
        ["rollout.engine_args.load_format", "set by the trainer", "remove it"],
    ),
    (
        ["rollout.engine_args={block_size: 16}"],
        ["rollout.engine_args.block_size", "key of its own", "set rollout.block_size"],
    ),
    (
        ["rollout.enable_chunked_prefill=false", "rollout.max_num_batched_tokens=512"],
        ["rollout.max_num_batched_tokens=512", "whole prompt and response", "set 2048 or 0"],
    ),
    (["reshard.interval=0"], ["reshard.interval=0", "must be at least 1", "the default is 1"]),
    (["ppo.dual_clip=0.5"], ["ppo.dual_clip=0.5", "must be 0 (off) or above 1", "take 3"]),
    (["ppo.kl.estimator=k3"], ["ppo.kl.estimator=k3", "takes k1 only", "ppo.kl.place=loss"]),
    (["ppo.kl.place=loss"], ["ppo.kl.estimator=k1", "takes k2 or k3 only", "ppo.kl.estimator=k2"]),
    (
        ["ppo.kl.place=off", "ppo.kl.adaptive=true"],
        ["ppo.kl.adaptive=true", "nothing to adapt with ppo.kl.place=off", "set it to false"],
    ),
    (
        ["ppo.kl.coefficient=0", "ppo.kl.adaptive=true"],
        ["ppo.kl.adaptive=true", "ppo.kl.coefficient=0.0", "above 0"],
    ),
    (
        ["actor.optimizer.minimum_learning_rate=1e-3"],
        ["actor.optimizer.minimum_learning_rate=0.001", "at most learning_rate=1e-06", "set 0"],
    ),
    (
        ["critic.optimizer.overlap_param_gather=true"],
        [
            "critic.optimizer.overlap_param_gather=true",
            "overlap_grad_reduce, which is false",
            "set critic.optimizer.overlap_grad_reduce=true",
        ],
    ),
    # a critic on the actor's backbone
    (
        ["critic.shared_loss_weight=0.5"],
        ["critic.shared_loss_weight=0.5", "critic.shared_backbone=false", "leave the weight at"],
    ),
    *[
        (["critic.shared_backbone=true", override], [override, "shared_backbone=true", *parts])
        for override, *parts in (
            ("critic.model=m", "a head on the actor's model", "leave it at ''"),
            ("critic.optimizer.learning_rate=0.1", "actor.optimizer trains", "leave it at '5e-06'"),
            ("critic.recompute.granularity=full", "actor.recompute holds", "leave it at 'none'"),
            ("critic.offload_weights=true", "a part of the actor", "leave it at 'false'"),
            ("critic.parallel.pipeline_model_parallel_size=2", "in the actor's passes", "=1; set"),
            ("critic.layer_spec=local", "where actor.layer_spec=auto", "leave it out"),
            ("ppo.critic_warmup_steps=3", "cannot be trained alone", "set 0"),
        )
    ],
    (["critic.optimizer.beta2=1"], ["critic.optimizer.beta2=1.0", "below 1", "take 0.9"]),
    # reward
    (["reward.model=m"], ["reward.function=rewards.py:score, reward.model=m", "exactly one"]),
    (["reward.function="], ["reward.function=", "neither", "path/to/file.py:name"]),
    (["reward.function=score"], ["reward.function=score", "must name a file", "module:name"]),
    (
        ["critic.recompute.num_layers=2"],
        ["critic.recompute.num_layers=2", "granularity=none", "set granularity=full, or 0"],
    ),
    (["actor.recompute=full"], ["actor.recompute=full", "is a section", "recompute.granularity"]),
    (["reward.function=a.py:"], ["reward.function=a.py:", "must name a file", "module:name"]),
]

# The same for rules that need the numbers of MODEL, and for files.
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
BAD_FOR_MODEL: list[tuple[list[str], list[str]]] = [
    (
        ["rollout.max_response_tokens=4000"],
        ["rollout.max_response_tokens=4000", "context of 4096", "take at most 3072"],
    ),
    (
        ["evaluation.max_response_tokens=4000"],
        ["evaluation.max_response_tokens=4000", "context of 4096", "take at most 3072"],
    ),
    (
        ["rollout.stop_token_ids=[500]"],
        ["rollout.stop_token_ids=[500]", "vocabulary of 128", "below 128"],
    ),
    (
        [
            "actor.parallel.pipeline_model_parallel_size=2",
            "actor.parallel.virtual_pipeline_model_parallel_size=3",
        ],
        ["virtual_pipeline_model_parallel_size=3", "2 layers of a stage", "take 1 or 2"],
    ),
    (["actor.model=none"], ["actor.model=none", "no such directory", "give a Hugging Face"]),
    (["critic.model=none"], ["critic.model=none", "no such directory", "give a Hugging Face"]),
    (["ref.model=empty"], ["ref.model=empty", "holds no config.json", "give a Hugging Face"]),
    (["data.prompts=none"], ["data.prompts=none", "no such file", "give a JSONL"]),
    (["evaluation.prompts=none"], ["evaluation.prompts=none", "no such file", "give a JSONL"]),
    (["data.tokenizer=none"], ["data.tokenizer=none", "no such file or directory", "leave it"]),
    (["reward.function=none.py:f"], ["reward.function=none.py:f", "no such file", "give path"]),
    (["checkpoint.resume=none"], ["checkpoint.resume=none", "no such folder", "give auto, never"]),
    (["run.output_dir=used"], ["run.output_dir=used", "already holds a run", "overwrite=true"]),
    (["run.output_dir=prompts.jsonl"], ["run.output_dir=prompts.jsonl", "is a file", "a folder"]),
]
