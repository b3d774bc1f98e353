"""What the documentation names is there: keys, files, links between pages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_megatron.config import Config
from rlhf_megatron.loader import options_of, sections_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SUFFIXES = {"json", "jsonl", "yaml", "py", "md", "txt", "log", "html", "pt", "sh"}
KEYS = {*options_of(Config), *sections_of(Config)}
MAPPINGS = [
    key for key, option in options_of(Config).items() if option.type_name.startswith("dict")
]


def code_of(page: Path) -> Iterator[str]:
    """Code spans, and lines of code blocks."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    yield from re.findall(r"^    (.+)$", text, flags=re.MULTILINE)


def keys_in(code: str) -> Iterator[str]:
    """Words that look like keys of the configuration."""
    if "unknown key" in code:  # an example of a message
        return
    tops = "|".join({key.split(".")[0] for key in KEYS})
    for word in re.findall(rf"(?<![\w./-])((?:{tops})(?:\.[a-z_0-9]+)+)", code):
        if word.rpartition(".")[2] not in SUFFIXES:
            yield word


def exists(key: str) -> bool:
    return key in KEYS or any(key.startswith(f"{mapping}.") for mapping in MAPPINGS)


def by_name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "config.md"], ids=by_name)
def test_keys_exist(page: Path) -> None:
    code = [*code_of(page)]
    found = {key for text in code for key in keys_in(text)}
    assert sorted(key for key in found if not exists(key)) == []
    sections = set(sections_of(Config))
    given = [key for text in code for key in keys_in(text) if f"{key}=" in text]
    assert sorted(sections.intersection(given)) == [], "a section takes no value"


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_files_exist(page: Path) -> None:
    folders = "configs|tools|launch|benchmarks|slurm|tests|requirements"
    found = {
        path
        for code in code_of(page)
        for path in re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]+\.(?:py|ya?ml|sh|txt))", code)
    }
    assert sorted(path for path in found if not (ROOT / path).is_file()) == []


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_the_rules_find_what_they_should() -> None:
    assert list(keys_in("rollout.top_p=1 ppo.kl.target config.yaml checkpoint.json")) == [
        "rollout.top_p",
        "ppo.kl.target",
    ]
    assert exists("faults.phase_limits.rollout")
    assert not exists("ppo.gama")
    assert "rewards.py" not in list(keys_in("rewards.py:score RUN/data.x"))
