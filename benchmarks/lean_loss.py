"""Memory and time of the chunked log-probs, entropy and their gradients, on a CPU or a GPU.

    python benchmarks/lean_loss.py --tokens 8192 --vocabulary 131072 --hidden 1024

Prints the peak beside the weight's own gradient, as a share of the whole [tokens, vocabulary]
float32 array, which is never made.
"""

import argparse
import json
import time

import torch

from rlhf_megatron.models.vocab_parallel import CHUNK_BYTES, VocabShard, token_log_probs
from rlhf_megatron.observability.memory import PeakMemory


class OneRank:
    """In place of a process group."""

    def size(self) -> int:
        return 1


def measure(
    *,
    tokens: int,
    vocabulary: int,
    hidden: int,
    device: torch.device,
    dtype: torch.dtype,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, float]:
    """The figures of one forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).mul_(0.02).to(device, dtype)
    weight.requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    shard = VocabShard(start=0, rows=vocabulary, vocab_size=vocabulary, group=OneRank())

    def run(count: int, rows: int) -> None:
        part = weight[:rows]
        found = token_log_probs(
            states[:count],
            weight=part,
            targets=targets[:count] % rows,
            shard=VocabShard(start=0, rows=rows, vocab_size=rows, group=shard.group),
            temperature=0.7,
        )
        torch.autograd.grad((found.logprobs - 0.01 * found.entropy).sum(), (states, part))

    run(8, 64)  # libraries allocate workspaces at their first call
    peak = PeakMemory(device)
    begin = time.perf_counter()
    found = token_log_probs(
        states,
        weight=weight,
        targets=targets,
        shard=shard,
        temperature=0.7,
        chunk_bytes=chunk_bytes,
    )
    gradients = torch.autograd.grad((found.logprobs - 0.01 * found.entropy).sum(), (states, weight))
    extra = peak.extra_bytes() - gradients[1].nbytes
    whole = 4 * tokens * vocabulary
    return {
        "seconds": time.perf_counter() - begin,
        "whole_bytes": whole,
        "extra_bytes": extra,
        "share": extra / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    found = measure(
        tokens=options.tokens,
        vocabulary=options.vocabulary,
        hidden=options.hidden,
        device=torch.device(options.device),
        dtype=getattr(torch, options.dtype),
        chunk_bytes=options.chunk_bytes,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
