"""report.html as a browser shows it: no script error, every chart drawn."""

import re
import shutil
import subprocess

import pytest
from report_runs import EVIL, write_run

from rlhf_megatron.observability.report import write_report

pytest.importorskip("plotly", reason="plotly is not installed here")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed here")


def page_after_scripts(path, *, folder):
    """The page's elements as they are when its scripts have run. Loads nothing but the file."""
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", f"--user-data-dir={folder / 'profile'}"),
            *("--window-size=390,800", "--virtual-time-budget=60000", "--dump-dom"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("names", [["one"], ["one", "two"]])
def test_every_chart_is_drawn_without_a_script_error(tmp_path, names):
    runs = [write_run(tmp_path / n, seed=i, response=EVIL) for i, n in enumerate(names, start=1)]
    written = write_report(runs)
    shown = page_after_scripts(written.path, folder=tmp_path)
    body = re.search(r"<body[^>]*>", shown)
    assert body is not None
    found = dict(re.findall(r'data-(\w+)="(\d+)"', body.group()))
    number = str(written.num_charts)
    assert found == {"charts": number, "drawn": number, "errors": "0"}
    assert written.num_charts > 20
    # Plotly puts the class on the element once it has drawn into it.
    assert len(re.findall(r'class="chart[^"]*js-plotly-plot', shown)) == written.num_charts
    assert "<img src=" not in shown
