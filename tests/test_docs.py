"""The documentation: its code runs, its links lead somewhere, and the short examples work."""

import contextlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import unicodedata

import jax
import pytest

import mars_optax

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SCRIPTS = sorted(p for p in (ROOT / "examples").glob("*.py") if p.name != "__init__.py")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)

FENCE = re.compile(r"^```(\w*)(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"\]\[(mars_optax\.[\w.]+)\]")


def python_blocks(page):
    """(line, code, needed package) of each block; `title="Needs NAME"` makes a block optional."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        language, options, code = match.groups()
        if language == "python":
            assert not options or re.fullmatch(r' title="Needs \w+"', options), options
            needs = re.search(r"Needs (\w+)", options)
            yield text[: match.start(3)].count("\n"), code, needs and needs[1]


def without_code(page):
    return FENCE.sub("", page.read_text())


def anchors(page):
    """The ids that Python-Markdown gives the headings."""

    def slug(heading):
        text = unicodedata.normalize("NFKD", heading.replace("`", ""))
        text = re.sub(r"[^\w\s-]", "", text.encode("ascii", "ignore").decode()).strip().lower()
        return re.sub(r"[-\s]+", "-", text)

    return {slug(h) for h in re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)}


@contextlib.contextmanager
def quick_compilation():
    """These blocks run many small programs once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@every_page
def test_no_subscript_is_taken_for_emphasis(page):
    """Markdown reads the two underscores of "g⁻_t ... x_{t−1}" as italics, for want of a letter."""
    prose = re.sub(r"`[^`\n]*`", "", without_code(page))
    assert not re.findall(r"[^\w\s`*\[(|]_\w", prose)


@every_page
def test_code_blocks_run(page, tmp_path):
    """Blocks of a page share a namespace, as a reader who copies them would have it."""
    namespace = {"__name__": page.stem}
    with contextlib.chdir(tmp_path), quick_compilation():
        for line, code, needs in python_blocks(page):
            if needs and importlib.util.find_spec(needs) is None:
                continue
            # Padded, so that a traceback names the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_code_blocks_are_found():
    assert sum(len(list(python_blocks(page))) for page in PAGES) > 40


@every_page
def test_links_lead_somewhere(page):
    text = without_code(page)
    for target in LINK.findall(text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page if not path else page.parent / path
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}: no such heading"
    documented = set(re.findall(r"^::: (\S+)", (DOCS / "reference.md").read_text(), re.MULTILINE))
    for name in REFERENCE.findall(text):
        assert name in documented, f"{page.name} refers to {name}, which is not in reference.md"


def test_every_public_name_is_in_the_reference_and_every_page_in_the_navigation():
    text = (DOCS / "reference.md").read_text()
    documented = re.findall(r"^::: mars_optax\.(\w+)$", text, re.MULTILINE)
    assert sorted(documented) == sorted(mars_optax.__all__)
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[1:] if f": {page.name}" not in navigation] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_example_scripts_run(script, tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "XLA_FLAGS": ""}
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=env,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert len(script.read_text().splitlines()) <= 40


def test_scripts_are_listed_on_the_start_page():
    start = (DOCS / "index.md").read_text()
    assert SCRIPTS
    assert [s.name for s in SCRIPTS if f"`{s.name}`" not in start] == []
