"""report.html: a run, or several side by side, in one file to open in a browser.

Needs the package plotly, which draws; it is imported only here and in report_charts.py, when a
report is asked for.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.errors import UserError
from rlhf_megatron.observability.report_charts import all_charts
from rlhf_megatron.observability.report_data import read_runs
from rlhf_megatron.observability.report_page import page

logger = logging.getLogger(__name__)

REPORT = "report.html"
INSTALL = 'pip install -e ".[report]"'


class PlotlyMissingError(UserError):
    """The package that draws the charts is not installed."""

    def __init__(self) -> None:
        super().__init__(f"a report needs the package plotly: {INSTALL}, or pip install plotly")


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """A report that was written."""

    path: Path
    num_bytes: int
    num_charts: int
    seconds: float


def write_report(folders: Sequence[Path], *, output: Path | None = None) -> WrittenReport:
    """Write a report of the runs in `folders` (each a run.output_dir; one may still be going).

    `output`: by default report.html in the first run's folder; it appears whole or not at all.
    Raises UserError for a folder without a run, PlotlyMissingError, OSError.
    """
    begin = time.monotonic()
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise PlotlyMissingError from None
    runs = read_runs(folders)
    charts = all_charts(runs)
    text = page(runs, charts=charts, plotly_script=get_plotlyjs())
    path = output if output is not None else Path(folders[0]) / REPORT
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return WrittenReport(
        path=path,
        num_bytes=path.stat().st_size,
        num_charts=len(charts),
        seconds=time.monotonic() - begin,
    )


def report_at_end(folder: Path) -> WrittenReport | None:
    """Write the report of a run that is ending; where that fails, warn and return None.

    Whatever goes wrong here, the run itself is done and saved.
    """
    try:
        return write_report([folder])
    except PlotlyMissingError as error:
        logger.warning("%s was not written: %s", REPORT, error)
    except Exception as error:
        again = f"python tools/report.py {folder}"
        logger.warning("%s was not written: %r; try again with `%s`", REPORT, error, again)
        logger.info("the traceback:", exc_info=True)
    return None
