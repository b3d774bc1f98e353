"""The run's folder: made once, never mixed with another run's files."""

from pathlib import Path

from rlhf_megatron.checkpoint.step_folders import remove_leftovers
from rlhf_megatron.config import Config, resolved_yaml
from rlhf_megatron.errors import UserError
from rlhf_megatron.resume import LINES_BY_STEP, ResumePoint, cut_back
from rlhf_megatron.validation import METRICS_FILE, holds_a_run, is_restart


def open_run_folder(config: Config, *, point: ResumePoint | None) -> None:
    """Make a new run's folder, or cut the one that is gone on with back to the checkpoint; on rank
    0 only. Raises UserError."""
    folder, text = Path(config.run.output_dir), resolved_yaml(config)
    if point is None or not point.in_place:
        # A restart found no checkpoint yet: what its first start has written is its own.
        overwrite = config.run.overwrite or is_restart()
        prepare_run_folder(folder, overwrite=overwrite, resolved_yaml=text)
        _clear_beginnings(folder)
        return
    try:
        cut_back(point, output_dir=folder)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.output_dir={str(folder)!r}: cannot be written ({error})") from error


def _clear_beginnings(folder: Path) -> None:
    """Remove what a run that ended before its first step has written: lines of step 0."""
    for name in LINES_BY_STEP:
        (folder / name).unlink(missing_ok=True)
    remove_leftovers(folder / "checkpoints")


def prepare_run_folder(output_dir: str | Path, *, overwrite: bool, resolved_yaml: str) -> None:
    """Make the folder and write config.yaml; on rank 0 only.

    Raises UserError where the folder holds a run and `overwrite` is not set, or cannot be written.
    """
    folder = Path(output_dir)
    aside = None
    if holds_a_run(folder):
        if not overwrite:
            raise UserError(
                f"run.output_dir={str(folder)!r}: holds a run already ({METRICS_FILE} exists); "
                "choose another folder, or set run.overwrite=true to move it aside"
            )
        number = 1
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
    try:
        if aside is not None:
            folder.rename(aside)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(resolved_yaml, encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.output_dir={str(folder)!r}: cannot be written ({error})") from error
