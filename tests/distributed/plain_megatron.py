"""Plain Megatron-Core: build a GPTModel with its own local layers, load a sharded checkpoint, give
logits. Imports nothing of this project, to show that other Megatron programs read its checkpoints.

On GPUs: torchrun --nproc-per-node 2 plain_megatron.py --weights CHECKPOINT/actor/weights \\
             --config CHECKPOINT/actor/hf/config.json --tensor-parallel 2 --tokens 1,2,3
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def logits(
    rank: int, weights: Path, config_json: Path, tensor_parallel_size: int, tokens: Tensor
) -> Tensor:
    """[B, S] tokens -> [B, S, V] float32 logits, vocabulary padding included, on each rank."""
    hf = json.loads(Path(config_json).read_text())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
    model_parallel_cuda_manual_seed(1)
    on_gpu = torch.cuda.is_available()
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel_size,
        use_cpu_initialization=not on_gpu,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    rows = -(-hf["vocab_size"] // 128) * 128  # Megatron-LM's own padding, not this project's
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=rows,
        max_sequence_length=hf["max_position_embeddings"],
        parallel_output=False,
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf["rope_parameters"]["rope_theta"],
    ).eval()
    if on_gpu:
        model.cuda()
    state = dist_checkpointing.load(model.sharded_state_dict(), str(weights))
    model.load_state_dict(state)
    length = tokens.size(1)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(length).expand_as(tokens)
    if on_gpu:
        tokens, positions, mask = tokens.cuda(), positions.cuda(), mask.cuda()
    with torch.no_grad():
        found = model(tokens, positions, mask)
    return found.float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--tokens", required=True, help="token ids, separated by commas")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    tokens = torch.tensor([[int(word) for word in options.tokens.split(",")]])
    found = logits(rank, options.weights, options.config, options.tensor_parallel, tokens)
    if rank == 0:
        print(found[0, -1].topk(5))


if __name__ == "__main__":
    main()
