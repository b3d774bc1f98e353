"""Exchange between ranks: only token ids, lengths and per-token scalars travel."""

import logging
import os
import time
from collections.abc import Sequence

import torch.distributed as dist

from rlhf_megatron.batch import RaggedBatch, concatenate

logger = logging.getLogger(__name__)


def gather_batch(part: RaggedBatch | None, *, group: dist.ProcessGroup) -> RaggedBatch:
    """All ranks' samples as one batch, the same on every rank, ordered by (prompt, sample).

    Each sample must be in one rank's part only; None where a rank has none. What comes out does not
    depend on how many engines there were or which rank scored what. The whole step's ids and
    scalars fit host memory easily (1024 samples of 4096 tokens: about 0.1 GB), and with the same
    batch everywhere each role can cut it to its own layout without asking its peers.
    """
    started = time.perf_counter()
    parts: list[RaggedBatch | None] = [None] * group.size()
    dist.all_gather_object(parts, part, group=group)
    if os.environ.get("RLHF_MEGATRON_DEBUG") == "1":
        shapes = [None if p is None else (len(p), p.num_tokens) for p in parts]
        logger.debug(
            "exchange all_gather_object: (samples, tokens) by rank %s, %d bytes, %.3f ms",
            shapes,
            sum(p.num_bytes for p in parts if p is not None),
            1e3 * (time.perf_counter() - started),
        )
    filled = [p for p in parts if p is not None and len(p) > 0]
    assert filled, "no rank has any sample"
    return concatenate(filled).sorted_by_prompt()


def share_out(count: int, *, part: int, num_parts: int) -> range:
    """Indices of one of `num_parts` shares of `count` items, dealt in turn."""
    return range(part, count, num_parts)


def gather_lists(items: Sequence, *, group: dist.ProcessGroup) -> list:
    """The items of all ranks, rank by rank."""
    parts: list[Sequence] = [()] * group.size()
    dist.all_gather_object(parts, list(items), group=group)
    return [item for part in parts for item in part]
