"""The README's first Python example runs, and its command table is the command line's."""

import importlib
import re
from pathlib import Path

import pytest

from vlhmm.cli.main import available

README = Path(__file__).parent.parent / "README.md"


def test_the_first_example_stands_on_the_first_screen_and_runs(tmp_path, monkeypatch):
    text = README.read_text(encoding="utf-8")
    start = text.index("```python\n") + len("```python\n")
    assert text[:start].count("\n") <= 40
    monkeypatch.chdir(tmp_path)  # it saves its model
    names: dict[str, object] = {}
    exec(text[start : text.index("```", start)], names)
    import vlhmm

    loaded = vlhmm.load("runs/first")
    assert loaded.score("the cat runs .") == names["model"].score("the cat runs .")


def test_the_quickstart_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    page = (README.parent / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        if "to_frame" not in block:  # pandas may be missing
            exec(block, names)
    import vlhmm

    assert vlhmm.load("runs/quickstart").score("a dog sleeps .") == names["model"].score("a dog sleeps .")


def test_every_command_is_in_the_table():
    assert re.findall(r"^\| `vlhmm (\S+)` \|", README.read_text(encoding="utf-8"), re.M) == list(available())


@pytest.mark.parametrize("page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_every_linked_file_is_there(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_site_has_every_page():
    listed = re.findall(r"^[a-z]+$", (README.parent / "docs" / "index.md").read_text(encoding="utf-8"), re.M)
    assert sorted({*listed, "index"}) == sorted(page.stem for page in (README.parent / "docs").glob("*.md"))


def found(dotted: str) -> bool:
    """Whether `a.b.Class.method` exists in the package."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(["vlhmm", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    return False


def test_every_function_that_the_documents_list_exists():
    architecture = (README.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [name for name in re.findall(r"^\d+\. `([\w.]+)`", architecture, re.M) if not name.startswith("torch")]
    table = (README.parent / "docs" / "mathematics.md").read_text(encoding="utf-8").split("\n## ")[0]
    for line in table.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        first = ""
        for name in re.findall(r"`([\w.]+)`", cells[3]) if len(cells) > 4 else []:
            first = name if not name.startswith(".") else first
            named.append(name if not name.startswith(".") else first.rsplit(".", 1)[0] + name)
    assert len(named) > 40 and [name for name in named if not found(name)] == []
