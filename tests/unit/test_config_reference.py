"""docs/config.md lists every key, and is what the code says today."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_megatron.config import Config
from rlhf_megatron.config_names import ELSEWHERE
from rlhf_megatron.config_reference import docstrings_of, reference_page, rule_of
from rlhf_megatron.loader import options_of, sections_of
from rlhf_megatron.schema import choice, number, secret

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "config.md"


@dataclass(kw_only=True)
class Example:
    """An example."""

    rate: float = number(0.5, minimum=0, maximum=1, exclusive=True)
    """How *fast* | over
    two lines."""

    kind: str = choice("a", "b")
    """Which."""

    undocumented: int = 3

    token: str = secret()
    """Of the server."""


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page(), "run `make docs`"


def test_every_key_has_one_row_with_type_default_and_meaning() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+?) \|$", reference_page(), re.M)
    keys = [key for key, *_ in rows if key in options_of(Config)]
    assert sorted(keys) == sorted(options_of(Config))
    for key, rule, default, meaning in rows:
        assert key in ELSEWHERE or all((rule.strip(), default.strip(), meaning.strip())), key
    headings = re.findall(r"^## ([\w.]+)$", reference_page(), re.M)
    assert [h for h in headings if h not in options_of(Config)] == sections_of(Config)


def test_links_lead_to_headings() -> None:
    page = reference_page()
    headings = re.findall("## (.+)", page)
    anchors = {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
    links = re.findall(r"\]\(#([^)]+)\)", page)
    assert links
    assert set(links) <= anchors


def test_rules_in_words() -> None:
    fields = options_of(Example)
    assert rule_of(float, metadata=fields["rate"].metadata) == "number, above 0, at most 1"
    assert rule_of(str, metadata=fields["kind"].metadata) == "`a`, `b`"
    assert rule_of(str, metadata=fields["token"].metadata) == "secret text"
    assert docstrings_of(Example) == {
        "rate": "How *fast* | over two lines.",
        "kind": "Which.",
        "token": "Of the server.",
    }


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = load_tool()
    page = tmp_path / "config.md"
    assert tool.main(["--output", str(page)]) == 0
    assert tool.main(["--check", str(page)]) == 0
    assert tool.main([]) == 0
    assert capsys.readouterr().out == page.read_text()
    page.write_text("old\n")
    assert tool.main(["--check", str(page)]) == 2
    assert "out of date; run `make docs`" in capsys.readouterr().err
    assert tool.main(["--output", str(tmp_path / "none" / "x.md")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_line() -> None:
    words = [sys.executable, "tools/config_reference.py", "--check", "docs/config.md"]
    assert subprocess.run(words, cwd=ROOT).returncode == 0
