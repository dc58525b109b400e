"""architecture.md and decisions.md against the package: folders, names, and the step that is drawn."""

from __future__ import annotations

import ast
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gradwatch
from tests.test_layers import LEVEL, ROOT, SOURCES, nodes, parsed

PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
DECISIONS = PAGE.with_name("decisions.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w/.]+)` \| (T?) ?\| (.+) \|$", TEXT, re.M)
ARROW = re.compile(
    r'^ +(\w+)(?:\["([^"]+)"\])? (-->|-- "[^"]*" -->|-\. "[^"]*" \.->) (\w+)(?:\["([^"]+)"\])?$', re.M
)
Arrow = tuple[str, str]


def room(place: str) -> str:
    """The layer's name of a file or folder in the package."""
    return place.split("/")[0].removesuffix(".py")


def test_every_folder_has_its_sentence() -> None:
    """And every file at the root that is a layer: lowest layer first, a folder before those in it."""
    folders = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in SOURCES if path.parent != ROOT}
    places = [place for place, _, _ in ROWS]
    assert {place for place in places if place.endswith("/")} == folders
    assert {room(place) for place in places} == LEVEL.keys()
    assert [LEVEL[room(place)] for place in places] == sorted(LEVEL[room(place)] for place in places)
    for place in places:
        assert (
            "/" not in place[:-1]
            or f"{place.rstrip('/').rpartition('/')[0]}/" in places[: places.index(place)]
        )
    assert all(len(sentence) > 10 and sentence.endswith(".") for _, _, sentence in ROWS)


def test_what_needs_torch_is_marked() -> None:
    """T stands at the folders whose modules import torch where they are imported themselves."""
    needs = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in SOURCES if imports_torch(path)}
    marked = {place for place, mark, _ in ROWS if mark}
    assert marked == needs - {"./"}


def imports_torch(path: Path) -> bool:
    """Whether a module imports torch at its top."""
    nodes = parsed(path).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == "torch" for name in names)


def test_every_name_exists() -> None:
    """Files and folders are there; every other word in code is a name or a key in the sources of the package."""
    known = {"gw", *(word for path in SOURCES for word in names(parsed(path)))}
    for code in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", TEXT + DECISIONS, flags=re.M | re.S)):
        if re.fullmatch(r"[\w/]+(?:/|\.py)", code):
            assert (ROOT / code).exists() or (ROOT.parent / code).exists(), code
        else:
            assert set(re.findall(r"[A-Za-z_]\w*", code)) <= known, code


OF_FORMATS = {"events", "every", "gradwatch", "norms", "read_run", "reason", "version", "with"}


def test_what_a_folder_says_of_its_files_is_there() -> None:
    """A name in code, in small letters, in the docstring of a folder is that of a file or folder in it."""
    for path in SOURCES:
        if path.name == "__init__.py":
            said = set(re.findall(r"`([a-z][a-z0-9_]+)/?`", ast.get_docstring(parsed(path)) or ""))
            assert said - OF_FORMATS <= {one.stem for one in path.parent.iterdir()}, path


def names(tree: ast.Module) -> Iterator[str]:
    """Every identifier of a module, and the words of its short texts: keys of rule files, options, names of columns."""
    for node in nodes(tree):
        for value in vars(node).values():
            if isinstance(value, str) and len(value) < 100:
                yield from re.findall(r"\w+", value)


def drawn() -> dict[Arrow, bool]:
    """The arrows of the picture from file to file, and whether each of them is dotted."""
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```$", TEXT, re.M | re.S)
    found = ARROW.findall(picture)
    assert len(found) == picture.count("->")
    files = {
        node: file for (*ends,) in found for node, file in ((ends[0], ends[1]), (ends[3], ends[4])) if file
    }
    return {(files[start], files[end]): "." in line for start, _, line, end, _ in found}


@contextmanager
def calls(files: set[str]) -> Iterator[set[Arrow]]:
    """Which of `files` calls which in the block, in this thread and in those started in it; others are passed over."""
    found: set[Arrow] = set()
    places = {str(ROOT / file): file for file in files}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        callee = places.get(frame.f_code.co_filename) if event == "call" else None
        if callee is None:
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename not in places:
            caller = caller.f_back
        if caller is not None and places[caller.f_code.co_filename] != callee:
            found.add((places[caller.f_code.co_filename], callee))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


GIVEN_FROM_ABOVE = {
    (
        "capture/read_after_backward.py",
        "session/attachments.py",
    ),  # drawn: which optimizers a backward reached
    (
        "capture/weights/weight_health.py",
        "session/attachments.py",
    ),  # the weights that there are, when a look is due
    ("capture/weights/weight_health.py", "session/checkpoint_health.py"),  # the steps that they are of
    (
        "account/rules_without_data.py",
        "session/binding/unread_columns.py",
    ),  # whether a Snapshot has what a rule reads
    ("reading/row_sums_by_blas.py", "capture/snapshot_assembly.py"),  # `silently` runs what it is given
}
"""From file to file, what a healthy step asks of a function that was given from above, beside listeners of hooks."""

ASKED_BY_A_SCRAPE = {
    ("sinks/prometheus/sink.py", "session/boundary/optimizer_step.py"),  # how many steps wait to be judged
}
"""From file to file, what /metrics asks of a function that was given from above; no step waits for it."""


@contextmanager
def upward_calls() -> Iterator[set[Arrow]]:
    """Which file of the package calls one in a higher layer in the block, also with code of others in between."""
    found: set[Arrow] = set()
    places = {str(path): path.relative_to(ROOT).as_posix() for path in SOURCES}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        entered = (
            event == "call" and frame.f_code.co_name != "<genexpr>"
        )  # values that are made as they are taken
        callee = places.get(frame.f_code.co_filename) if entered else None
        caller = frame.f_back
        while callee and caller is not None and caller.f_code.co_filename not in places:
            caller = caller.f_back
        if callee and caller is not None:
            place = places[caller.f_code.co_filename]
            if LEVEL[room(place)] < LEVEL[room(callee)]:
                found.add((place, callee))

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_healthy_step_calls_nothing_above_it(tmp_path: Path) -> None:
    """But for the listeners of hooks, and what is asked for a value; judged alone or together with others."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    inputs = torch.randn(16, 4)
    with gradwatch.watch(model, optimizer, rules="default", run_dir=tmp_path) as gw:

        def steps(number: int) -> None:
            for _ in range(number):
                optimizer.zero_grad()
                model(inputs).pow(2).mean().backward()
                optimizer.step()

        steps(60)
        gw.flush()
        with upward_calls() as found:
            steps(70)
            gw.flush()
    of_hooks = {arrow for arrow in found if room(arrow[0]) == "taps"}
    assert ("taps/step_hooks.py", "session/boundary/optimizer_step.py") in of_hooks
    assert found - of_hooks - GIVEN_FROM_ABOVE == set()


def test_the_picture_is_a_step(tmp_path: Path) -> None:
    """Each arrow is a call in a training with a NaN, skipped and explained; no call goes up but those drawn dotted."""
    arrows = drawn()
    files = {file for arrow in arrows for file in arrow}
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with calls(files) as found:
        gw = gradwatch.watch(model, optimizer, rules="default", run_dir=tmp_path, listen="127.0.0.1:0")
        found.clear()  # of attaching
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((3, 4), torch.nan if step == 2 else 1.0)).sum().backward()
            optimizer.step()
        assert gw.url is not None
        with urllib.request.urlopen(gw.url, timeout=30) as response:
            assert b'rule="non-finite"' in response.read()
        stepped = set(found)
        gw.close()
    assert arrows.keys() - stepped == set()
    upward = {arrow for arrow in stepped if LEVEL[room(arrow[0])] < LEVEL[room(arrow[1])]}
    assert upward - ASKED_BY_A_SCRAPE == {arrow for arrow in upward if arrows.get(arrow)}
    assert all(LEVEL[room(a)] >= LEVEL[room(b)] for (a, b), dotted in arrows.items() if not dotted)
