"""A new folder appears whole or not at all."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhf_megatron.errors import UserError


@contextmanager
def whole_folder(output: Path, *, replaces: Sequence[str] = ()) -> Iterator[Path]:
    """Give a folder beside `output` to write into; at the end of the block it becomes `output`.

    replaces: names that an earlier `output` may hold, which is then replaced. Where the block
    raises, what was written goes and an earlier `output` stays.

    Raises UserError where `output` is a file or holds anything but `replaces`.
    """
    output = output.resolve()
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {str(output)!r} is a file; give the name of a folder")
    foreign = sorted({p.name for p in output.iterdir()} - set(replaces)) if output.exists() else []
    if foreign:
        raise UserError(
            f"--output {str(output)!r} exists and holds {', '.join(foreign[:3])}; "
            "give a new or empty folder"
        )
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)
