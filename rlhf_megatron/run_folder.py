"""The run's folder: made once, never mixed with another run's files."""

from pathlib import Path

from rlhf_megatron.errors import UserError
from rlhf_megatron.validation import METRICS_FILE, holds_a_run


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
