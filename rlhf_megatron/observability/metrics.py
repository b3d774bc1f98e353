"""metrics.jsonl and the trackers, written on rank 0."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rlhf_megatron.errors import ConfigError
from rlhf_megatron.observability.config import LoggingConfig

WANDB_ID_FILE = "wandb_run_id.txt"
"""In the run's folder: under which id W&B knows the run, so that a resumed one goes on there."""
_INSTALL = 'pip install -e ".[logging]", or'


class MetricsWriter:
    """One JSON object a step in OUTPUT_DIR/metrics.jsonl, and the same figures in the trackers.

    A figure that is NaN or infinite is written as null, its key kept, and named in the list
    `nonfinite` of that line (JSON has no NaN). Lines are appended and flushed one by one.
    Raises ConfigError (a UserError) at the start where a tracker is asked for and cannot run.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        config: LoggingConfig,
        run_name: str,
        resolved_config: dict[str, Any],
        first_step: int = 1,
    ) -> None:
        """first_step: of a resumed run; what TensorBoard has of later steps is hidden."""
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        problems: list[str] = []
        self._tensorboard = _start_tensorboard(
            folder, config=config, first_step=first_step, problems=problems
        )
        self._wandb = _start_wandb(
            folder,
            config=config,
            run_name=run_name,
            resolved_config=resolved_config,
            problems=problems,
        )
        if problems:
            self._close_trackers()
            raise ConfigError(problems)
        self._file: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, step: int, *, metrics: Mapping[str, float]) -> None:
        """Append the figures of one step. Whole numbers stay whole."""
        line: dict[str, Any] = {"step": step}
        nonfinite = []
        for key, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            if not math.isfinite(number):
                nonfinite.append(key)
            line[key] = number if math.isfinite(number) else None
        finite = {key: value for key, value in line.items() if value is not None}
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for key, value in finite.items():
                self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def close(self) -> None:
        """Finish the trackers and close the file; may be called twice."""
        self._close_trackers()
        self._file.close()

    def _close_trackers(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            from wandb import teardown

            self._wandb.finish()
            # finish() of 0.31 returns before the last records are on the disk; this waits for them.
            teardown()
            self._wandb = None


def _start_tensorboard(
    folder: Path, *, config: LoggingConfig, first_step: int, problems: list[str]
) -> Any:
    if not config.tensorboard:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        problems.append(
            f"logging.tensorboard: true needs the package tensorboard ({error}): {_INSTALL} "
            "set logging.tensorboard=false"
        )
        return None
    return SummaryWriter(
        log_dir=str(folder / "tensorboard"), purge_step=first_step if first_step > 1 else None
    )


def _start_wandb(
    folder: Path,
    *,
    config: LoggingConfig,
    run_name: str,
    resolved_config: dict[str, Any],
    problems: list[str],
) -> Any:
    mode = config.wandb.mode
    if mode == "off":
        return None
    try:
        # By name: a folder called wandb on the path would pass for the package itself.
        from wandb import Settings, init
        from wandb.errors import Error as WandbError
    except ImportError as error:
        problems.append(
            f"logging.wandb.mode: {mode} needs the package wandb ({error}): {_INSTALL} "
            "set logging.wandb.mode=off"
        )
        return None
    id_file = folder / WANDB_ID_FILE
    known_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else ""
    try:
        run = init(
            project=config.wandb.project,
            name=config.wandb.name or run_name,
            mode="online" if mode == "online" else "offline",
            dir=str(folder),
            config=resolved_config,
            id=known_id or None,
            # What the run has logged of steps that are taken again stays as it is there.
            resume="allow" if known_id else None,
            # The run folder has its own logs; wrapping stdout would break the progress line.
            settings=Settings(console="off", silent=True),
        )
    except WandbError as error:
        problems.append(
            f"logging.wandb.mode: {mode}, but wandb does not start ({error}): log in with "
            "`wandb login`, or set logging.wandb.mode=offline"
        )
        return None
    id_file.write_text(f"{run.id}\n", encoding="utf-8")
    return run
