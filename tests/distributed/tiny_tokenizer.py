"""A tiny model directory with a word tokenizer, made on the spot."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_tiny_model(path: Path, **settings: int) -> None:
    """A random Llama of 2 layers, context 64, words t0..t60 and special tokens."""
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, **{f"t{i}": i + 3 for i in range(61)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **settings,
    }
    config = LlamaConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
