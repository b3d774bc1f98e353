"""The planner's arithmetic, and the scenarios that it is asked about."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cases import (
    LLAMA_7B,
    LLAMA_8B,
    LLAMA_13B,
    LLAMA_70B,
    LLAMA_405B,
    config_of,
    layouts,
    machine_of,
    offloaded,
    plan_of,
)

from rlhf_megatron.layout.megatron import megatron_rank_layout
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.memory import head
from rlhf_megatron.memory.activations import in_flight, layer_activations
from rlhf_megatron.memory.parameters import (
    engine_shapes,
    megatron_chunks,
    numel,
    physical_shapes,
    training_elements,
)
from rlhf_megatron.memory.plan import RoleModels
from rlhf_megatron.memory.suggestions import changed, shortage, suggest

SMALL = replace(
    LLAMA_13B,
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=131,
)


def grid(tp: int, pp: int, *, dp: int = 1, vpp: int = 1) -> ParallelLayout:
    return ParallelLayout(
        tuple(range(tp * pp * dp)), tp, pp, dp, virtual_pipeline_model_parallel_size=vpp
    )


def test_the_shards_add_up_to_the_published_models():
    for arch, published in ((LLAMA_13B, 13_015_864_320), (LLAMA_70B, 70_553_706_496)):
        layout = grid(8, 4)
        replicated = arch.num_layers * 2 * arch.hidden_size + arch.hidden_size
        held = sum(
            numel(chunk)
            for stage in range(4)
            for chunk in megatron_chunks(arch, layout=layout, stage=stage, head="lm")
        )
        assert 8 * held - 7 * replicated == published == num_parameters(arch, head="lm")


@pytest.mark.parametrize("arch", [SMALL, replace(SMALL, tie_word_embeddings=True, qk_norm=True)])
@pytest.mark.parametrize("head_name", ["lm", "value", "joint"])
def test_all_tensor_parallel_ranks_of_a_stage_hold_the_same_shapes(arch, head_name):
    for vpp in (1, 2):
        layout = grid(4, 2, vpp=vpp)
        for stage in (0, 1):
            chunks = megatron_chunks(arch, layout=layout, stage=stage, head=head_name)
            planned = {name: shape for chunk in chunks for name, shape in chunk.items()}
            for tp_rank in range(4):
                placed = physical_shapes(
                    megatron_rank_layout(
                        arch,
                        tensor_model_parallel_size=4,
                        tp_rank=tp_rank,
                        pipeline_model_parallel_size=2,
                        stage=stage,
                        head=head_name,
                        fused_norms=False,
                        virtual_pipeline_model_parallel_size=vpp,
                    ),
                    padded_names=(),
                    padded_rows=0,
                )
                for name, shape in placed.items():  # rows of padding alone are in no placement
                    is_vocabulary = planned[name][0] == 192 // 4 and len(shape) == 2
                    assert planned[name] == shape or (is_vocabulary and shape[0] < 192 // 4)
                missing = set(planned) - set(placed)
                assert all(planned[name] == (48, 64) for name in missing)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.integers(1, 7), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_replicas_share_a_buffer_out(sizes, replicas, _):
    chunk = {f"p{i}": (size,) for i, size in enumerate(sizes)}
    parts = [
        training_elements([chunk], data_parallel_size=replicas, replica=replica)
        for replica in range(replicas)
    ]
    assert sum(part.shard for part in parts) == sum(sizes)
    buffer = parts[0].buffer
    assert {part.buffer for part in parts} == {buffer}
    assert buffer % 128 == buffer % replicas == 0
    assert sum(sizes) <= buffer < sum(sizes) + 64 * len(sizes) + 128 * replicas


def test_engine_shapes_replicate_kv_heads_and_pad_the_vocabulary():
    shapes = engine_shapes(SMALL, tensor_parallel_size=2)
    assert shapes["model.embed_tokens.weight"] == (96, 64)  # 131 -> 192 rows
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == ((2 + 1 + 1) * 16, 64)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (96, 64)


def waiting_at_most(*, stages: int, stage: int, micro_batches: int) -> int:
    """1F1B, step by step: as many forward passes as later stages exist, then one of each."""
    warm_up = min(stages - stage - 1, micro_batches)
    now = most = warm_up
    for _ in range(micro_batches - warm_up):
        now += 1
        most = max(most, now)
        now -= 1
    return max(most, now)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16])
def test_1f1b_holds_fewer_micro_batches_on_later_stages(stages, micro_batches):
    for stage in range(stages):
        found = in_flight(grid(1, stages), stage=stage, num_micro_batches=micro_batches)
        assert found == waiting_at_most(stages=stages, stage=stage, micro_batches=micro_batches)


def test_interleaving_holds_more_than_1f1b_and_at_most_all():
    layout = grid(1, 4, vpp=2)
    found = [in_flight(layout, stage=p, num_micro_batches=16) for p in range(4)]
    # arXiv:2205.05198, section 4.2.3: 1 + (p - 1) / (p v) of a whole pipeline's layers, p stages
    # of v chunks, on the first stage.
    assert found[0] == pytest.approx(4 * (1 + 3 / 8))
    assert found == sorted(found, reverse=True)
    assert in_flight(layout, stage=0, num_micro_batches=1) <= 4


def test_a_layer_of_gpt3_needs_about_what_the_paper_says():
    """As Korthikanti et al. count their layer's 34 sbh (section 4.1), for RMS norms, rotary angles,
    SwiGLU and flash attention, and without dropout."""
    arch = replace(
        LLAMA_13B, hidden_size=12288, ffn_hidden_size=4 * 12288, num_attention_heads=96,
        num_key_value_heads=96, head_dim=128,
    )  # fmt: skip
    layer = layer_activations(arch, layout=grid(1, 1), tokens=2048, itemsize=2, kernels="flash")
    sbh = 2048 * 12288
    # Inputs of the norms 4 and of the linears 4, query and key 4, all three 6, output 2, SwiGLU 24.
    assert layer.saved("none") == pytest.approx((4 + 4 + 4 + 6 + 2 + 24) * sbh, rel=0.01)
    assert layer.saved("full") == 2 * sbh


def test_recomputing_more_saves_more_but_selective_saves_little_with_flash_attention():
    layer = layer_activations(
        LLAMA_70B, layout=grid(8, 4), tokens=16384, itemsize=2, kernels="flash"
    )
    none, selective, full = (layer.saved(kind) for kind in ("none", "selective", "full"))
    assert full < selective < none < 1.02 * selective
    assert layer.recomputed == none


def test_the_chunk_of_the_log_probs_is_the_models():
    from rlhf_megatron.models import vocab_parallel

    assert head.LOGITS_CHUNK_BYTES == {
        "composite": vocab_parallel.CHUNK_BYTES,
        "flash": vocab_parallel.GPU_CHUNK_BYTES,
    }


@pytest.fixture(scope="module")
def plan_70b():
    config = config_of(
        layouts=layouts(tp=8, pp=4),
        offload=offloaded("optimizer", "gradients"),
        rollout={"rollout.tensor_parallel_size": 8, "rollout.gpu_memory_utilization": 0.6},
    )
    return plan_of(config, model=LLAMA_70B, machine=machine_of(32, gpu_gb=80))


def test_lasting_state_of_70b_is_what_a_person_computes(plan_70b):
    rank = plan_70b.ranks[0]
    update = next(phase for phase in rank.phases if phase.phase == "update_actor")
    # A stage of 20 of 80 layers with the embedding, an eighth of it: 2.27e9 parameters.
    layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    elements = (20 * layer + 128256 * 8192) / 8 + 20 * 2 * 8192
    for kind, size in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
        assert update.of(owner="actor", kind=kind) == pytest.approx(size * elements, rel=1e-4)
    assert update.of(owner="critic", kind="optimizer") == 0  # on the host
    rollout = next(phase for phase in rank.phases if phase.phase == "rollout")
    assert rollout.of(owner="actor", kind="optimizer") == 0
    assert rollout.of(owner="engine") == pytest.approx(0.6 * 80e9, rel=1e-6)


def test_kv_capacity_is_whole_blocks(plan_70b):
    engine = plan_70b.engine
    capacity = engine.capacity
    assert capacity.token_bytes == 2 * 80 * 1 * 128 * 2
    blocks = engine.kv_cache // (16 * capacity.token_bytes)
    assert capacity.tokens == 16 * blocks
    assert capacity.sequences == min(256, blocks // (2048 // 16))


def test_first_and_last_stages_hold_the_vocabulary(plan_70b):
    peaks = {rank.stages["actor"]: rank.phases[-4].total for rank in plan_70b.ranks}
    assert set(peaks) == {0, 1, 2, 3}
    weights = {rank.stages["actor"]: rank.roles[0].resident["weights"] for rank in plan_70b.ranks}
    vocabulary = 128256 * 8192 // 8 * 2
    assert weights[0] - weights[1] == pytest.approx(vocabulary, rel=1e-3)
    assert weights[3] - weights[1] == pytest.approx(vocabulary, rel=1e-3)
    assert weights[1] == weights[2]


OFFLOADED_ROLLOUT = {"rollout.gpu_memory_utilization": 0.6, "rollout.sleep_level": 2}
FITTING = {
    "70b_32": (
        config_of(
            a=layouts(tp=8, pp=4),
            b=offloaded("optimizer", "gradients"),
            c=OFFLOADED_ROLLOUT | {"rollout.tensor_parallel_size": 8},
        ),
        {"model": LLAMA_70B, "machine": machine_of(32, gpu_gb=80)},
    ),
    "70b_64": (
        config_of(
            a=layouts(tp=8, pp=4),
            b=offloaded("optimizer"),
            c={"rollout.tensor_parallel_size": 8},
        ),
        {"model": LLAMA_70B, "machine": machine_of(64, gpu_gb=80)},
    ),
    "13b_two_of_40gb_with_adapters": (
        config_of(a=layouts(tp=2), b=offloaded("weights"), c={"rollout.tensor_parallel_size": 2}),
        {"model": LLAMA_13B, "machine": machine_of(2, gpu_gb=40), "lora_rank": 64},
    ),
    "7b_one_of_24gb_with_adapters": (
        config_of(
            b=offloaded("optimizer", "gradients", "weights"),
            c={"rollout.gpu_memory_utilization": 0.85, "ppo.micro_batch_tokens": 4096},
        ),
        {"model": LLAMA_7B, "machine": machine_of(1, gpu_gb=24), "lora_rank": 16},
    ),
    "405b_504_with_8b_critic": (
        config_of(
            a=layouts(tp=8, pp=9)
            | {"critic.parallel.pipeline_model_parallel_size": 1, "ref.offload": True},
            c={
                "rollout.tensor_parallel_size": 16,
                "rollout.ranks": "0-495",
                "rollout.gpu_memory_utilization": 0.6,
                "rollout.prompts_per_step": 496,
                "ppo.mini_batch_samples": 496,
            },
        ),
        {"model": LLAMA_405B, "critic": LLAMA_8B, "machine": machine_of(504, gpu_gb=141)},
    ),
}


@pytest.mark.parametrize("name", FITTING)
def test_scenarios_that_fit(name):
    config, options = FITTING[name]
    start = time.process_time()
    plan = plan_of(config, **options)
    assert time.process_time() - start < 5
    assert plan.fits, plan.problems
    assert 0.5 < plan.peak.total / plan.machine.gpu_memory_bytes <= 1
    assert plan.engine.capacity.sequences >= 1


@pytest.mark.parametrize("name", ["13b_two_of_40gb_with_adapters", "7b_one_of_24gb_with_adapters"])
def test_small_cards_cannot_train_all_weights(name):
    """Not even with all that is not in use on the host: 18 bytes a parameter."""
    config, options = FITTING[name]
    everything = offloaded("optimizer", "gradients", "weights")
    plan = plan_of(changed(config, values=everything), **(options | {"lora_rank": 0}))
    assert not plan.fits
    assert plan.peak.phase in ("update_actor", "update_critic")
    ranks = options["machine"].world_size
    assert plan.peak.total > 18 * num_parameters(options["model"], head="lm") / ranks
    models = RoleModels(actor=options["model"], critic=options["model"], ref=options["model"])
    advice = suggest(config, models=models, machine=options["machine"], plan=plan)
    assert advice.together == ()


def test_405b_does_not_fit_an_engine_of_one_node():
    """Its bf16 weights alone are 101 GB a GPU at TP8."""
    config, options = FITTING["405b_504_with_8b_critic"]
    one_node = changed(config, values={"rollout.tensor_parallel_size": 8})
    plan = plan_of(one_node, **options)
    assert plan.engine.weights == pytest.approx(
        2 * num_parameters(LLAMA_405B, head="lm") / 8, rel=0.01
    )
    assert plan.engine.weights > 101e9
    assert plan.engine.kv_cache == 0
    assert not plan.fits
    assert any("KV cache" in problem for problem in plan.problems)


def advised(values=()):
    config = config_of(
        a=layouts(tp=8, pp=4),
        b=offloaded("optimizer", "gradients", "weights", value=False),
        c={"rollout.tensor_parallel_size": 8, "rollout.gpu_memory_utilization": 0.5} | dict(values),
    )
    machine = machine_of(32, gpu_gb=80)
    plan = plan_of(config, model=LLAMA_70B, machine=machine)
    models = RoleModels(actor=LLAMA_70B, critic=LLAMA_70B, ref=LLAMA_70B)
    return config, plan, suggest(config, models=models, machine=machine, plan=plan)


def test_suggestions_are_computed_and_ordered():
    config, plan, advice = advised()
    assert not plan.fits
    assert plan.peak.phase == "setup"
    assert "setup needs" in plan.problems[0]
    single = advice.single
    assert len(single) >= 4
    assert [s.fits for s in single] == sorted((s.fits for s in single), reverse=True)
    short = [s.gain_bytes for s in single if not s.fits]
    assert short == sorted(short, reverse=True)
    for suggestion in single:
        values = dict(text.split("=") for text in suggestion.overrides)
        plain = {key: {"true": True}.get(value, value) for key, value in values.items()}
        if all(key.split(".")[1].startswith("offload") for key in values):
            again = plan_of(changed(config, values=plain), model=LLAMA_70B, machine=plan.machine)
            assert plan.peak.total - again.peak.total == suggestion.gain_bytes
            assert plan.node_host_bytes - again.node_host_bytes == suggestion.host_gain_bytes
        assert suggestion.cost


def test_suggestions_together_fit():
    _, plan, advice = advised()
    assert shortage(plan) > 0
    assert advice.plan_together is not None
    assert advice.plan_together.fits
    assert shortage(advice.plan_together) == 0
    texts = [text for s in advice.together for text in s.overrides]
    assert any("offload_optimizer=true" in text for text in texts)


def test_nothing_is_suggested_where_it_fits():
    _, plan, advice = advised({"actor.offload_optimizer": True, "critic.offload_optimizer": True,
                               "actor.offload_gradients": True, "critic.offload_gradients": True,
                               "ref.offload": True})  # fmt: skip
    assert plan.fits
    assert advice.single == advice.together == ()


def test_a_nodes_memory_is_checked_where_it_is_known():
    config, options = FITTING["70b_32"]
    small = replace(options["machine"], host_memory_bytes=int(512e9))
    plan = plan_of(config, **(options | {"machine": small}))
    assert not plan.fits
    assert "host memory" in plan.problems[0]


@given(
    st.sampled_from(["none", "selective", "full"]),
    st.integers(4096, 65536),
    st.sampled_from([(), ("optimizer",), ("optimizer", "gradients"), ("weights",)]),
)
@settings(max_examples=25, deadline=None)
def test_peaks_move_the_way_that_they_must(recompute, tokens, parts):
    def peak(**changes):
        values = {
            "actor.recompute.granularity": recompute,
            "ppo.micro_batch_tokens": tokens,
            "rollout.tensor_parallel_size": 8,
        }
        config = config_of(
            a=layouts(tp=8, pp=4),
            b=values,
            c=offloaded(*parts),
            d={k.replace("__", "."): v for k, v in changes.items()},
        )
        plan = plan_of(config, model=LLAMA_70B, machine=machine_of(64, gpu_gb=80))
        return plan.peak.total

    now = peak()
    assert peak(actor__recompute__granularity="full") <= now
    assert peak(ppo__micro_batch_tokens=2 * tokens) >= now
    assert peak(actor__offload_weights=True) <= now
    assert peak(rollout__gpu_memory_utilization=0.4) <= now
