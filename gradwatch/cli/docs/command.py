"""`gradwatch docs [TOPIC]`: pages of the documentation, in the terminal or in a browser."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gradwatch.cli.terminal import colourful, console, paint, redrawable, table
from gradwatch.errors import GradwatchError
from gradwatch.runtime.spelling import did_you_mean

DESCRIPTION = """The documentation that came with this gradwatch: a page by its name (`gradwatch docs rules`), or a
kind of detector (`gradwatch docs spike`). Without a TOPIC all pages are listed. Into a pipe a page is written as it
is, in Markdown."""
WIDEST = 110
_FIRST = ("start", "concepts", "howto", "using")
_STYLE = """
:root{color-scheme:light dark}body{font:16px/1.55 system-ui,sans-serif;max-width:56em;margin:2em auto;padding:0 1em}
pre,code{font:14px/1.45 ui-monospace,monospace}pre{white-space:pre-wrap;padding:.8em;border:1px solid #8886}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.25em .8em;border:1px solid #8886;text-align:left}
img{max-width:100%}h1 code,h2 code{font:inherit}
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch docs` to argparse."""
    parser = commands.add_parser(
        "docs",
        help="the documentation, in the terminal or a browser",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "topic", nargs="?", metavar="TOPIC", help="name of a page; without one, all are listed"
    )
    parser.add_argument("--browser", action="store_true", help="open the page in a browser instead")
    parser.add_argument("--json", action="store_true", help="list the pages as JSON")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Show a page, or list them. Raises GradwatchError for a page that does not exist."""
    found = topics()
    if arguments.json:
        pages = {name: {"title": title(path), "path": str(path)} for name, path in found.items()}
        print(json.dumps(pages, indent=2))
        return 0
    if arguments.topic is None:
        rows = [(name, title(path)) for name, path in found.items() if "/" not in name]
        print(table(("topic", "what it is"), rows))
        kinds = sum(name.startswith("kinds/") for name in found)
        print(
            f"\nand {kinds} kinds of detectors, as kinds lists them; next: {paint('gradwatch docs start', 'bold')}"
        )
        return 0
    path = page_of(arguments.topic, found)
    if arguments.browser:
        return browse(arguments.topic, path)
    text = path.read_text(encoding="utf-8")
    if not redrawable(sys.stdout):
        sys.stdout.write(text)
        return 0
    from rich.markdown import Markdown

    screen = console(sys.stdout, min(console(sys.stdout).width, WIDEST))
    with screen.pager(styles=colourful(sys.stdout)):
        screen.print(Markdown(without_comments(text), hyperlinks=False))
    return 0


def topics() -> dict[str, Path]:
    """The pages by name: those of the manual, then those of the reference."""
    import gradwatch

    folder = Path(gradwatch.__file__).parent / "docs"
    manual = {path.stem: path for path in sorted(folder.glob("*.md"))}
    first: dict[str, Path] = {name: manual.pop(name) for name in _FIRST if name in manual}
    reference = folder / "reference"
    made = {
        str(path.relative_to(reference).with_suffix("")): path
        for path in sorted(reference.rglob("*.md"), key=lambda path: (len(path.parts), path))
    }
    return {**first, **manual, **{name: path for name, path in made.items() if name not in manual}}


def page_of(topic: str, found: Mapping[str, Path]) -> Path:
    """The page of a name, also of a kind without its folder. Raises GradwatchError where there is none."""
    name = topic.removesuffix(".md")
    path = found.get(name) or found.get(f"kinds/{name}")
    if path is None:
        known = [one.rpartition("/")[2] for one in found]
        pages = _pages_with(name, found)
        where = f"; more of it stands in: {', '.join(pages)}" if pages else did_you_mean(name, known)
        raise GradwatchError(f"there is no page {topic!r}{where}; `gradwatch docs` lists all")
    return path


def _pages_with(word: str, found: Mapping[str, Path], most: int = 3) -> list[str]:
    """The names of the pages in which a word stands most often."""
    as_word = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    counts = {name: len(as_word.findall(path.read_text(encoding="utf-8"))) for name, path in found.items()}
    return [name for name in sorted(counts, key=counts.__getitem__, reverse=True) if counts[name]][:most]


def title(path: Path) -> str:
    """The first heading of a page."""
    with path.open(encoding="utf-8") as lines:
        return next(
            (line.lstrip("# ").strip().replace("`", "") for line in lines if line.startswith("# ")), ""
        )


def without_comments(text: str) -> str:
    """A page without its comments, which are for those who change it."""
    return re.sub(r"<!--.*?-->\n*", "", text, flags=re.S)


def browse(topic: str, path: Path) -> int:
    """Open the page in a browser, as a file of its own; 1 where there is no browser, and the file is named."""
    import webbrowser

    with tempfile.NamedTemporaryFile(
        "w", prefix="gradwatch-docs-", suffix=".html", delete=False, encoding="utf-8"
    ) as file:
        file.write(page_html(topic, path))
    opened = webbrowser.open(Path(file.name).as_uri())
    print(file.name if opened else f"{file.name} (no browser was found: open it in one)")
    return 0 if opened else 1


def page_html(topic: str, path: Path) -> str:
    """The page as HTML; links lead to the other pages as they lie in the package, pictures to theirs."""
    import html

    from markdown_it import MarkdownIt

    body = (
        MarkdownIt("commonmark", {"html": False})
        .enable("table")
        .render(without_comments(path.read_text(encoding="utf-8")))
    )
    base = html.escape(path.parent.as_uri() + "/")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><base href="{base}">'
        f"<title>gradwatch: {html.escape(topic)}</title><style>{_STYLE}</style>\n{body}</html>\n"
    )
