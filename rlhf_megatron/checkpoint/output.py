"""A folder that all ranks of a job write into, and that appears whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from rlhf_megatron.checkpoint.paths import check_output, partial_folder
from rlhf_megatron.distributed.agreement import nothing, together


@contextmanager
def shared_output(
    output: Path, *, overwrite: bool, group: dist.ProcessGroup, what: str
) -> Iterator[Path]:
    """Give a folder beside `output` to write into; at the end of the block it becomes `output`.

    Collective over `group`, whose ranks share the file system. Raises UserError on all ranks where
    `output` exists and `overwrite` is not set, or cannot be written. Where the block raises, what
    was written goes and an earlier `output` stays: the block's errors must reach all ranks
    (`together`).
    """
    partial = partial_folder(output)
    replaced = output.with_name(f".{output.name}.replaced")
    first = dist.get_rank(group) == 0

    def prepare() -> None:
        check_output(output, overwrite=overwrite)
        for left_over in (partial, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)

    try:
        together(prepare if first else nothing, group=group, what=what)
        yield partial
        together(finish if first else nothing, group=group, what=what)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
