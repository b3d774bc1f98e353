"""Random models of every family with awkward numbers, what transformers says of them, and what
Megatron-Core models in any layout do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from roles import Shape, build_role, micro_batches, new_factory
from small_models import make_batch, response_log_probs
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import MicroBatch
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.megatron import megatron_problems

REFERENCE = "reference_log_probs.pt"
SIZES = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 36,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_llama3": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "head_dim": 12}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    "llama_yarn_tied": (
        "Llama",
        {
            "rope_parameters": {**YARN, "beta_fast": 4.0},
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "mistral_window": ("Mistral", {"sliding_window": 5, "head_dim": 12}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_yarn_tied": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3_tied": ("Qwen3", {"head_dim": 18, "tie_word_embeddings": True}),
}
"""kind -> prefix of transformers' classes, fields of the config."""
NUMBERS = {
    "": {"num_hidden_layers": 12, "num_key_value_heads": 1},
    "_odd": {"num_hidden_layers": 9, "num_key_value_heads": 3},
}
"""By suffix of the kind. 12 layers with one KV head fit all layouts up to TP 4 and 3 x 2 chunks; 9
with three KV heads fit TP and PP of 1 and 3 only."""
KINDS = [family + suffix for suffix in NUMBERS for family in FAMILIES]


def make_family_model(kind: str, **changes: Any) -> Any:
    """A model whose distributions are neither flat nor peaked, in float32."""
    suffix = "_odd" if kind.endswith("_odd") else ""
    prefix, fields = FAMILIES[kind.removesuffix("_odd")]
    fields = fields | changes
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    model = model_class(model_class.config_class(**SIZES | NUMBERS[suffix] | fields))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


def save_family_models(rank: int, folder: Path, kinds: Sequence[str]) -> None:
    """A directory of each kind under `folder`, with transformers' answer."""
    for kind in kinds:
        model = make_family_model(kind)
        model.save_pretrained(folder / kind)
        torch.save(reference_log_probs(model), folder / kind / REFERENCE)


def save_reference(rank: int, directory: Path, target: Path) -> None:
    """Make `target` a directory with the same files, and transformers' answer in float32."""
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).symlink_to(file.resolve())
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.save(reference_log_probs(model.eval()), target / REFERENCE)


def family_batch() -> RaggedBatch:
    """Five samples of 2 to 23 tokens; all but their last tokens are states."""
    return make_batch((1,) * 5, response_lengths=(22, 3, 1, 9, 5), seed=3)


@torch.no_grad()
def reference_log_probs(model: Any) -> Tensor:
    """[R, V] in float32, by a model that sees one sample at a time."""
    return response_log_probs(model, batch=family_batch(), temperature=1.0)


def valid_shapes(arch: ModelArchitecture, *, largest_world: int = 8) -> list[Shape]:
    """The layouts out of TP {1,2,3,4} x PP {1,2,3} x VPP {1,2} that the model can be cut into."""
    return [
        Shape(tp=tp, pp=pp, vpp=vpp)
        for tp in (1, 2, 3, 4)
        for pp in (1, 2, 3)
        for vpp in (1, 2)
        if tp * pp <= largest_world
        and not megatron_problems(
            arch,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
        )
    ]


def worst_errors(rank: int, directories: dict[str, Path], shape: Shape) -> dict[str, float]:
    """Per model, the largest difference of a log-prob, over the whole vocabulary, from that of
    transformers (the file REFERENCE in the model's directory)."""
    factory = new_factory()
    found = {}
    for kind, directory in directories.items():
        engine = build_role(directory, shape=shape, factory=factory)
        reference = torch.load(directory / REFERENCE)
        found[kind] = float((all_log_probs(engine) - reference).abs().max())
    return found


def all_log_probs(engine: ModelEngine) -> Tensor:
    """[R, V] of `family_batch`, in three micro-batches."""
    vocabulary = engine.model.arch.vocab_size

    def outputs(hidden: Tensor, micro: MicroBatch) -> dict[str, tuple[Tensor, Tensor]]:
        logits = hidden[micro.state_indices] @ engine.model.output_weight.T
        shards = [torch.empty_like(logits) for _ in range(engine.model.groups.collection.tp.size())]
        dist.all_gather(shards, logits, group=engine.model.groups.collection.tp)
        log_probs = torch.cat(shards, dim=1)[:, :vocabulary].log_softmax(dim=1)
        rows = micro.response_rows[:, None] * vocabulary + torch.arange(vocabulary)
        return {"all": (log_probs.flatten(), rows.flatten())}

    batch = family_batch()
    micros = micro_batches(engine, batch, samples_by_replica=[[[1], [0, 3], [4, 2]]])
    size = batch.num_response_tokens * vocabulary
    return engine.infer(micros, outputs=outputs, sizes={"all": size})["all"].view(-1, vocabulary)
