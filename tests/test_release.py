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
from lightning_weave.config import check_recipe, merge_tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *DOCS.glob("*.ipynb")])
RECIPES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_lock_has_the_tested_versions_from_the_public_index() -> None:
    text = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    locked: dict[str, set[str]] = {}
    for package in tomllib.loads(text)["package"]:
        locked.setdefault(package["name"], set()).add(package["version"])
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        known = locked.get(re.sub(r"[-_.]+", "-", name.lower()))
        assert known is None or version in known, line
    (own,) = [one for one in tomllib.loads(text)["package"] if one["name"] == "lightning-weave"]
    wanted = {
        re.split(r"[<>=]", one)[0]
        for one in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    }
    assert {one["name"] for one in own["dependencies"]} == wanted


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
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert listed == written | {"tutorial.md"}  # made of the notebook


def test_the_tutorial_is_a_page_with_all_its_cells() -> None:
    notebook = (DOCS / "tutorial.ipynb").read_text()
    page = run_path(str(ROOT / "scripts" / "site_links.py"))["as_markdown"](notebook)
    assert page.startswith("# Your own weights")
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        assert (f"```python\n{source}\n```" if cell["cell_type"] == "code" else source) in page


NAMES = ("brief-only", "acc-only", "both", "even")  # of compositions that parts of recipes mention


@pytest.mark.parametrize("text", RECIPES)
def test_recipes_on_the_pages_load(text: str) -> None:
    """A whole recipe as it is; a part of one as an addition to a whole recipe."""
    part = tomllib.loads(text)
    if "name" in part:
        assert check_recipe(part).compositions
        return
    anchors = {name: {"post": "p", "pre": "q"} for name in ("a", "b", "accuracy", "brevity")}
    whole = {
        "name": "r",
        "student": {"model": "m"},
        "anchors": anchors,
        "compositions": {name: {"weights": {"a": 0.5, "b": 0.5}} for name in NAMES},
        "prompts": {"source": "prompts.jsonl"},
    }
    check_recipe(merge_tables(whole, part))


def test_the_reference_has_every_public_name() -> None:
    documented = re.findall(r"^::: (\S+)$", (DOCS / "python.md").read_text(), re.MULTILINE)
    for name in documented:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last) or find_spec(name), name
    assert {"lightning_weave.api.Run", "lightning_weave.errors"} <= set(documented)
    for room in (lightning_weave.maths, lightning_weave.heads):
        homes = {one.__module__ for one in vars(room).values() if callable(one)}
        assert {home for home in homes if home.startswith("lightning_weave.")} <= set(documented)


def _pages(entry: str | list[dict[str, str]]) -> list[str]:
    return [entry] if isinstance(entry, str) else [page for one in entry for page in one.values()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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
