"""Build a role's Megatron-Core model over its own process groups."""

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhf_megatron.distributed.groups import RoleGroups
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.megatron import chunk_prefix, megatron_rank_layout, padded_vocab_size
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.models.compat import transformer_engine_imports
from rlhf_megatron.models.config import RecomputeConfig
from rlhf_megatron.models.heads import JointOutput, ValueHead, replace_output_layer
from rlhf_megatron.models.layers import block_spec
from rlhf_megatron.models.rope import rope
from rlhf_megatron.models.vocab_parallel import VocabShard

logger = logging.getLogger(__name__)

LM_HEAD: Head = "lm"
VALUE_HEAD: Head = "value"
JOINT_HEAD: Head = "joint"
NO_RECOMPUTE = RecomputeConfig()


@dataclass
class RoleModel:
    """One rank's part of a role's model, and how to find its way in it."""

    arch: ModelArchitecture
    head: Head
    groups: RoleGroups
    config: TransformerConfig
    chunks: list[GPTModel]
    """In the order in which a token passes them; more than one with virtual pipeline stages."""
    fused_norms: bool

    def parameters(self) -> dict[str, Tensor]:
        """Live parameters by GPTModel's names, each with its chunk before it where there are
        several (layout.megatron.chunk_prefix)."""
        return dict(self._parameters)

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        """Parameters stay the objects that they are, whatever storage they have; to look for them
        takes a millisecond."""
        return {
            chunk_prefix(number, virtual_pipeline_model_parallel_size=len(self.chunks)) + name: p
            for number, chunk in enumerate(self.chunks)
            for name, p in chunk.named_parameters()
        }

    def rank_layout(self, rank: int) -> RankLayout:
        """Where the logical tensors lie on any rank of the role."""
        layout = self.groups.layout
        at = layout.coordinates(rank)
        return megatron_rank_layout(
            self.arch,
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            tp_rank=at.tp,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            stage=at.pp,
            head=self.head,
            fused_norms=self.fused_norms,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        )

    @property
    def vocab_shard(self) -> VocabShard:
        layout = self.groups.layout
        rows = (
            padded_vocab_size(
                self.arch.vocab_size,
                tensor_model_parallel_size=layout.tensor_model_parallel_size,
            )
            // layout.tensor_model_parallel_size
        )
        return VocabShard(
            start=rows * self.groups.coordinates.tp,
            rows=rows,
            vocab_size=self.arch.vocab_size,
            group=self.groups.collection.tp,
        )

    def take_values(self) -> Tensor | None:
        """The values of the last forward pass of the last chunk, [T]; None where it has no joint
        output. Takes them out, so that they do not outlive the pass."""
        output = getattr(self.chunks[-1], "output_layer", None)
        return output.take_values() if isinstance(output, JointOutput) else None

    @property
    def output_weight(self) -> Tensor:
        """[V / t, H] weight of the language-model head, on the last stage."""
        last = self.chunks[-1]
        if last.share_embeddings_and_output_weights:
            return last.shared_embedding_or_output_weight()
        return last.output_layer.weight


def use_transformer_engine(layer_spec_name: str, *, device: torch.device) -> bool:
    """Whether a role's layers are Transformer Engine's; logs what "auto" took."""
    if layer_spec_name == "auto":
        found = device.type == "cuda" and transformer_engine_imports()
        logger.info("layer_spec auto: %s", "transformer_engine" if found else "local")
        return found
    return layer_spec_name == "transformer_engine"


def transformer_config(
    arch: ModelArchitecture,
    *,
    groups: RoleGroups,
    precision: str,
    recompute: RecomputeConfig,
    device: torch.device,
    fp8: bool = False,
    dtype: torch.dtype | None = None,
    initialize: bool = True,
) -> TransformerConfig:
    """Megatron-Core's configuration for an architecture in a role's layout.

    `dtype` overrides the precision's parameter type (float64 in tests of gradients).
    """
    layout = groups.layout
    bf16 = precision == "bf16"
    params_dtype = dtype or (torch.bfloat16 if bf16 else torch.float32)
    sequence_parallel = layout.sequence_parallel and layout.tensor_model_parallel_size > 1
    virtual = layout.virtual_pipeline_model_parallel_size
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_key_value_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        # Sums the norms' gradients over the TP ranks, each of which has other heads.
        qk_layernorm=arch.qk_norm,
        softmax_scale=rope(arch).attention_factor ** 2 * arch.head_dim**-0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=bf16,
        # Scales of the present tensors: nothing is carried from pass to pass, or in a checkpoint.
        fp8="hybrid" if fp8 else None,
        fp8_recipe="tensorwise",
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=device.type == "cpu",
        # 0.16.1 loses the tensor-parallel attributes with perform_initialization=False, and then
        # computes wrong gradient norms in silence (tests/distributed/test_models.py).
        perform_initialization=initialize,
        calculate_per_token_loss=True,
        # The interleaved schedule runs micro-batches of one length (engine/microbatch.py): with two
        # stages Megatron-Core (0.16.1, 0.19.2) would exchange the shapes of what goes forward and
        # back between the same two ranks in another order than the tensors.
        variable_seq_lengths=layout.pipeline_model_parallel_size > 1 and virtual == 1,
        # Unused without experts, but its default is refused beside variable lengths.
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=device.type == "cuda",
        batch_p2p_sync=device.type == "cuda",
        # SwiGLU in one pass, rounded once, as vLLM's compiled graphs have it; saves its input only.
        # Compiled by torch at the first call; on a CPU that would take a C++ compiler.
        bias_activation_fusion=device.type == "cuda",
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **_recompute_options(recompute),
    )


def _recompute_options(recompute: RecomputeConfig) -> dict[str, Any]:
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if recompute.granularity == "full":
        # "block": the first layers of each (virtual) stage; "uniform": all, one by one.
        some = recompute.num_layers > 0
        return {
            "recompute_granularity": "full",
            "recompute_method": "block" if some else "uniform",
            "recompute_num_layers": recompute.num_layers if some else 1,
        }
    return {}


def build_model(
    arch: ModelArchitecture,
    *,
    head: Head,
    groups: RoleGroups,
    precision: str,
    layer_spec_name: str,
    recompute: RecomputeConfig = NO_RECOMPUTE,
    device: torch.device,
    fp8: bool = False,
    seed: int,
    dtype: torch.dtype | None = None,
    initialize: bool = True,
) -> RoleModel:
    """Build this rank's part of a model with random weights on `device`.

    initialize: False leaves the weights as the memory is, for a model that is filled and saved but
    never trained (its tensor-parallel attributes may be missing).
    fp8: as ActorConfig.fp8; only where `use_transformer_engine` holds.
    head "lm" keeps the output weight without its product (models/heads.py); "value" puts a scalar
    head in its place; "joint" has both.
    """
    groups.seed(seed)
    with groups.active():
        config = transformer_config(
            arch,
            groups=groups,
            precision=precision,
            recompute=recompute,
            device=device,
            fp8=fp8,
            dtype=dtype,
            initialize=initialize,
        )
        fused = use_transformer_engine(layer_spec_name, device=device)
        assert fused or not fp8, "fp8 without Transformer Engine"
        chunks = [
            _build_chunk(
                arch, config=config, head=head, groups=groups, number=number, fused=fused,
                device=device, dtype=dtype,
            )
            for number in range(groups.layout.virtual_pipeline_model_parallel_size)
        ]  # fmt: skip
    return RoleModel(
        arch=arch, head=head, groups=groups, config=config, chunks=chunks, fused_norms=fused
    )


def _build_chunk(
    arch: ModelArchitecture,
    *,
    config: TransformerConfig,
    head: Head,
    groups: RoleGroups,
    number: int,
    fused: bool,
    device: torch.device,
    dtype: torch.dtype | None,
) -> GPTModel:
    """One of the rank's chunks: all of its part of the model but with virtual stages."""
    layout = groups.layout
    virtual = layout.virtual_pipeline_model_parallel_size
    is_last = groups.is_last_stage and number == virtual - 1
    gpt = GPTModel(
        config,
        block_spec(
            arch,
            num_layers=arch.num_layers // (layout.pipeline_model_parallel_size * virtual),
            transformer_engine=fused,
            device=device,
        ),
        vocab_size=padded_vocab_size(
            arch.vocab_size, tensor_model_parallel_size=layout.tensor_model_parallel_size
        ),
        max_sequence_length=arch.max_position_embeddings,
        pre_process=groups.is_first_stage and number == 0,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings and head != VALUE_HEAD,
        position_embedding_type="none",  # the attention core turns queries and keys
        pg_collection=groups.collection,
        vp_stage=number if virtual > 1 else None,
    )
    if is_last:
        if head == VALUE_HEAD:
            gpt.output_layer = ValueHead(config, tp_group=groups.collection.tp)
        else:
            replace_output_layer(gpt, with_values=head == JOINT_HEAD)
    gpt.to(device)
    if dtype is not None:
        gpt.to(dtype)
    _zero_vocabulary_padding(gpt, arch=arch, groups=groups)
    return gpt


def _zero_vocabulary_padding(gpt: GPTModel, *, arch: ModelArchitecture, groups: RoleGroups) -> None:
    """Padding rows are never read; zeros keep them out of norms and checkpoints comparable."""
    tp = groups.layout.tensor_model_parallel_size
    rows = padded_vocab_size(arch.vocab_size, tensor_model_parallel_size=tp) // tp
    real = max(0, min(rows, arch.vocab_size - rows * groups.coordinates.tp))
    for name, parameter in gpt.named_parameters():
        if name.endswith("word_embeddings.weight") or (
            name == "output_layer.weight" and parameter.size(0) == rows
        ):
            with torch.no_grad():
                parameter[real:].zero_()
