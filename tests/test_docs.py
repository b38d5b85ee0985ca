"""What the documents name is there: files, functions, tests, headings; the map has every module."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cute_moe", "host", "kernels", "perf", "tests")
DOCS = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PATH = re.compile(r"[\w*.-]+(/[\w*.-]+)*(\.(py|md|sh|json|svg|toml)|/)")
NAME = re.compile(r"([a-z]\w*_\w*)(\(.*\))?")
MADE = ("FILE.json", "build/")  # by the commands that the documents show


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def files(*suffixes: str) -> list[Path]:
    """All files of the project's folders that end so."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.*"))]
    return [path for path in found if path.suffix in suffixes]


@cache
def words() -> frozenset[str]:
    """Every word of the code, this file left out."""
    code = [path for path in files(".py", ".sh") if path != Path(__file__).resolve()]
    return frozenset(re.findall(r"\w+", "\n".join(p.read_text(encoding="utf-8") for p in code)))


def spans(text: str) -> list[str]:
    """What stands between backticks, blocks of code left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def paths(text: str) -> list[str]:
    """The paths of files and folders among the spans, by themselves or in commands."""
    parts = [part for span in spans(text) for part in span.split()]
    return [part for part in parts if PATH.fullmatch(part) and not part.startswith(MADE)]


def exists(path: str) -> bool:
    """Whether a path exists; a name without a folder may lie in any."""
    if "/" in path or any(ROOT.glob(path)):
        return any(ROOT.glob(path.rstrip("/")))
    return any(next((ROOT / folder).rglob(path), None) for folder in (*FOLDERS, "docs"))


def anchors(text: str) -> set[str]:
    """What a link can name after "#": the headings, in GitHub's spelling."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("doc", DOCS)
def test_paths_exist(doc: str) -> None:
    missing = [path for path in paths(read(doc)) if not exists(path)]
    assert not missing


def test_documents_that_the_code_names_exist() -> None:
    code = {path: path.read_text(encoding="utf-8") for path in files(".py", ".sh")}
    named = [(path.name, doc) for path in code for doc in re.findall(r"docs/\w+\.md", code[path])]
    assert not [place for place in named if not (ROOT / place[1]).exists()]


@pytest.mark.parametrize("doc", DOCS)
def test_links_lead_somewhere(doc: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", read(doc)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / doc).parent / path if path else ROOT / doc
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("doc", DOCS)
def test_names_occur_in_the_code(doc: str) -> None:
    parts = [span.rpartition(".")[2] if "(" not in span else span for span in spans(read(doc))]
    names = [match[1] for match in map(NAME.fullmatch, parts) if match]
    assert not [name for name in names if name not in words()]


def test_the_file_map_has_every_module() -> None:
    table = read("docs/design.md").partition("## File map")[2]
    listed, folder = [], ""
    for row in re.findall(r"^\| (`.+?) \|", table, flags=re.MULTILINE):
        for path in spans(row):
            folder = path.rpartition("/")[0] if "/" in path else folder
            listed += ROOT.glob(path.rstrip("/") if "/" in path else f"{folder}/{path}")
    modules = [path for path in files(".py") if path.name != "__init__.py"]
    absent = [path for path in modules if not {path, *path.parents} & set(listed)]
    assert not [str(path.relative_to(ROOT)) for path in absent]
