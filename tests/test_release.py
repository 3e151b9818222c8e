"""What a release has to agree on, and documents whose links lead somewhere."""

import json
import re
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest
import yaml

import lightning_weave
from lightning_weave import __version__
from lightning_weave.config import check_recipe

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb")])


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_hook_before_a_commit_is_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]] == ["make lint"]


def test_issue_templates_are_forms() -> None:
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert len({part["id"] for part in form["body"]}) == len(form["body"])


def test_every_page_is_on_the_site() -> None:
    """`make docs-site` builds it; what is not in its navigation is hard to find."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {page for section in nav for entry in section.values() for page in _pages(entry)}
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} | {"tutorial.md"}  # made of the notebook


def test_the_tutorial_is_a_page_with_all_its_cells() -> None:
    notebook = (ROOT / "docs" / "tutorial.ipynb").read_text()
    page = run_path(str(ROOT / "scripts" / "site_links.py"))["as_markdown"](notebook)
    assert page.startswith("# Your own weights")
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        assert (f"```python\n{source}\n```" if cell["cell_type"] == "code" else source) in page


QUESTIONS = ("two-specialists", "system-prompt", "adapters", "one-card", "agent-logs")


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_page_of_a_question_has_a_whole_recipe(name: str) -> None:
    (recipe,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
    assert check_recipe(tomllib.loads(recipe)).compositions


def test_the_reference_has_every_public_name() -> None:
    documented = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    for name in documented:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last) or find_spec(name), name
    assert {"lightning_weave.api.Run", "lightning_weave.errors"} <= set(documented)
    for room in (lightning_weave.maths, lightning_weave.heads):
        homes = {one.__module__ for one in vars(room).values() if callable(one)}
        assert {home for home in homes if home.startswith("lightning_weave.")} <= set(documented)


def _pages(entry: str | list[dict[str, str]]) -> list[str]:
    return [entry] if isinstance(entry, str) else [page for one in entry for page in one.values()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not _leads_somewhere(page, link)]
    assert broken == []


def _leads_somewhere(page: Path, link: str) -> bool:
    if "://" in link:
        return True
    path, _, heading = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return False
    return not heading or heading in _headings(target.read_text(encoding="utf-8"))


def _headings(text: str) -> set[str]:
    """Headings as GitHub names them in links."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
