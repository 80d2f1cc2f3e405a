"""The documentation site: it builds without a warning, its links lead somewhere, and reading it asks no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs import site_hooks
from tests import support
from tests.promises import promise, proves

ROOT = Path(__file__).parent.parent
LOADED = {("script", "src"), ("img", "src"), ("source", "src"), ("iframe", "src"), ("video", "src"), ("object", "data")}
LOADED_RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "modulepreload", "manifest"}


class Page(HTMLParser):
    """What a page loads, where it leads, and where links may lead in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.anchors = path, {""}
        self.loads: list[str] = []
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [given[name] for each, name in LOADED if each == tag and name in given]
        if tag == "link" and set(given.get("rel", "").split()) & LOADED_RELATIONS:
            self.loads.append(given["href"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    support.leave_to_test_all("the documentation site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path) for path in site.rglob("*.html")}
    assert len(found) > 50
    return found


@promise("""project.site-loads-nothing: The documentation site builds without a warning. Reading it loads nothing from
    other hosts.""")
def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert sorted({load for page in pages.values() for load in page.loads if urlsplit(load).netloc}) == []
    styles = "\n".join(path.read_text() for path in site.rglob("*.css"))
    assert [each for each in re.findall(r"(?:url\(|@import )['\"]?([^)'\";]+)", styles) if "//" in each[:8]] == []
    pictures = [path for path in site.rglob("*.svg") if re.search(r"(?:href|src)=\"https?:", path.read_text())]
    assert pictures == []


def problems(pages: dict[Path, Page]) -> Iterator[tuple[str, str]]:
    for page in pages.values():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.path.name == "404.html":
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else {""}
            if not target.exists() or unquote(parts.fragment) not in known | {"__top", "__toc"}:
                yield page.path.name, link


@proves("project.diagrams-links-commands-tests")
def test_links_of_the_site_lead_somewhere(pages: dict[Path, Page]) -> None:
    assert sorted(set(problems(pages))) == []


def test_every_page_is_in_the_navigation() -> None:
    places, listed = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "decisions" / "index.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f": {path.name}\n" not in places] == []
    assert [path.name for path in (ROOT / "docs" / "decisions").glob("0*.md") if f"({path.name})" not in listed] == []


def test_links_out_of_the_documents_lead_to_the_project() -> None:
    assert site_hooks.address("../Makefile", Path("docs")) == f"{site_hooks.PROJECT}/blob/main/Makefile"
    assert site_hooks.address("../../src#x", Path("docs/decisions")) == f"{site_hooks.PROJECT}/tree/main/src#x"
    assert site_hooks.address("../fencing.md#silence", Path("docs/decisions")) == "../fencing.md#silence"


def test_a_link_that_shows_a_file_name_shows_the_title_of_the_page() -> None:
    assert site_hooks.title(ROOT / "docs" / "ssh.md") == "Many hosts by ssh"


def test_long_names_in_tables_may_break() -> None:
    before, after = "SLURM_STEP_NUM_NODES", "SLURM_<wbr>STEP_<wbr>NUM_<wbr>NODES"
    page = f'<td><a href="a_long_name_of_a_page.html"><code>{before}</code></a> short_name</td><p>{before}</p>'
    assert site_hooks.on_post_page(page) == page.replace(before, after, 1)


def test_an_option_does_not_break_after_a_dash() -> None:
    page = "<p><code>--rdzv-id a--b</code> --rdzv-id</p>"
    assert site_hooks.on_post_page(page) == page.replace("--rdzv-id", '<span class="option">--rdzv-id</span>', 1)
