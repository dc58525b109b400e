"""P34: a bundle from anybody is read or refused with file and place; it runs nothing and writes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gradwatch.cli import main
from gradwatch.errors import MissingDependencyError
from gradwatch.incidents.bundle.bundle_reader import BundleError, load_tensors, read_document, read_tensors
from gradwatch.incidents.bundle.incident_json import Document
from tests.incidents.bundle.cases import Run, build, rules, seeded
from tests.support.examples import examples

FILES = ("incident.json", "tensors.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with everything in it."""
    return Run(tmp_path_factory.mktemp("runs"), rules()).only


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """One to be spoilt."""
    return Path(shutil.copytree(whole, tmp_path / "bundle"))


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its size and time of change."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def replayed(bundle: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """`gradwatch replay` with a script: the exit status, and what it complained of. Nothing else may happen."""
    before = everything(bundle.parent)
    status = main(["replay", str(bundle), "--script", "tests.incidents.bundle.cases:build"])
    assert everything(bundle.parent) == before
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    return status, said.err


def test_what_was_written_is_read(whole: Path) -> None:
    """The document comes back equal, and encodes to the same bytes."""
    document = read_document(whole)
    assert document.encode() == (whole / "incident.json").read_bytes()
    assert {name.partition(".")[0] for name in read_tensors(whole)} == {
        *("input", "gradient_at_output", "gradient", "buffer", "parameter", "generator", "site"),
    }


def test_keys_of_a_newer_gradwatch_are_ignored(copy: Path) -> None:
    """Added anywhere; a newer version is refused by its number."""
    found = json.loads((copy / "incident.json").read_text(encoding="utf-8"))
    plain = read_document(copy).encode()
    found["novel"] = found["incident"]["novel"] = found["calls"][0]["novel"] = {"x": 1}
    (copy / "incident.json").write_text(json.dumps(found))
    assert read_document(copy).encode() == plain
    (copy / "incident.json").write_text(json.dumps({**found, "version": 2}))
    with pytest.raises(BundleError, match=r"incident.json: version 2; this gradwatch reads version 1"):
        read_document(copy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "incident.json:1:1: not JSON"),
        ('{\n "a": 1,\n "b" 2}', "incident.json:3:6: not JSON"),
        ("[1]", "no `format: gradwatch-incident`"),
        ("[" * 100_000, "not JSON that can be read"),
        ('{"x": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ('{"format": "gradwatch-incident", "version": 1}', "incident.json: incident: Field required"),
        ('{"format": "gradwatch-incident", "version": true}', "incident: Field required"),
        (
            '{"format": "gradwatch-incident", "version": 1, "incident": {"name": 3, "step": "x"}}',
            "incident.json: incident.name: Input should be a valid string",
        ),
        (
            '{"format": "gradwatch-incident", "version": 1, "incident": {"name": "a", "step": 1}, "calls": [{}]}',
            "incident.json: calls.0.model: Field required",
        ),
    ],
)
def test_what_is_no_document_is_refused_with_the_place(text: str, says: str, copy: Path) -> None:
    """Line and column where it is no JSON, the path of the key where it is."""
    (copy / "incident.json").write_text(text)
    with pytest.raises(BundleError) as refused:
        read_document(copy)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (
            struct.pack("<Q", 1 << 62) + b"{}",
            "byte 0: a header of 4,611,686,018,427,387,904 bytes in a file of 10",
        ),
        (struct.pack("<Q", 200_000_000) + b"{}", "byte 0: a header of 200,000,000 bytes"),
        (struct.pack("<Q", 2) + b"{}x", "byte 8: not safetensors"),
        (struct.pack("<Q", 2) + b"[]", "byte 8: not safetensors"),
        (b"\x80\x04" + b"cos\nsystem\n", "byte 0: a header of"),
    ],
)
def test_what_is_no_safetensors_is_refused_with_the_place(raw: bytes, says: str, copy: Path) -> None:
    """The length of the header is looked at before anything is made of it."""
    (copy / "tensors.safetensors").write_bytes(raw)
    with pytest.raises(BundleError) as refused:
        read_tensors(copy)
    assert str(refused.value).startswith(f"{copy}/tensors.safetensors: ")
    assert says in str(refused.value)


def header(**tensors: Any) -> bytes:
    """A safetensors file whose header claims these tensors, over 16 bytes of data."""
    told = json.dumps(tensors).encode()
    return struct.pack("<Q", len(told)) + told + bytes(16)


@pytest.mark.parametrize(
    "raw",
    [
        header(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}),
        header(a={"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 16]}),
        header(a={"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}),
        header(a={"dtype": "pickle", "shape": [4], "data_offsets": [0, 16]}),
        header(a={"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}),
        header(
            a={"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
            b={"dtype": "F32", "shape": [3], "data_offsets": [4, 16]},
        ),
    ],
    ids=["beyond the end", "overflow", "negative", "type", "backwards", "overlap"],
)
def test_tensors_that_lie_about_their_place_are_refused(raw: bytes, copy: Path) -> None:
    """Offsets, shapes and dtypes are checked against the file."""
    (copy / "tensors.safetensors").write_bytes(raw)
    with pytest.raises(BundleError, match="byte 8: not safetensors"):
        read_tensors(copy)


def test_names_are_names_and_never_paths(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`../` and absolute paths in every name there is: read as text, and nothing appears anywhere."""
    tensors = {"../../made-of-a-name": torch.ones(2), "/tmp/made-of-a-name": torch.ones(2)}
    save_file(tensors, copy / "tensors.safetensors")
    assert set(read_tensors(copy)) == set(tensors)
    found = json.loads((copy / "incident.json").read_text(encoding="utf-8"))
    for call in found["calls"]:
        call["args"] = {"tuple": [{"tensor": {"name": "../../made-of-a-name"}}]}
        call["batch"] = None
        call["gradients"] = {"0": "/etc/passwd"}
    found["incident"]["name"] = "../../../made-of-a-name"
    found["models"][0]["type"] = "../../made-of-a-name"
    (copy / "incident.json").write_text(json.dumps(found))
    status, said = replayed(copy, capsys)
    assert status == 2
    assert "tensors.safetensors" in said
    assert not list(copy.parent.parent.rglob("made-of-a-name"))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "absent", "device"])
def test_only_regular_files_are_read(name: str, kind: str, copy: Path, tmp_path: Path) -> None:
    """A link could lead anywhere, a pipe would block for ever, a device never ends."""
    place = copy / name
    content = place.read_bytes()
    place.unlink()
    if kind == "link":
        (tmp_path / "real").write_bytes(content)
        place.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "device":
        place.symlink_to("/dev/zero")
    with pytest.raises(BundleError, match=name):
        read_document(copy) if name == "incident.json" else read_tensors(copy)


def test_a_document_of_any_size_is_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is looked at first; a sparse file of a terabyte costs nothing."""
    with (copy / "incident.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match="1,099,511,627,776 bytes, more than"):
        read_document(copy)


def test_a_file_that_does_not_fit_into_memory_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No MemoryError reaches anybody."""
    from gradwatch.incidents.bundle import bundle_reader

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.close()

        def fileno(self) -> int:
            return int(self.file.fileno())

        def read(self, size: int) -> bytes:
            raise MemoryError

    real = open
    monkeypatch.setattr(bundle_reader, "open", lambda *args: Full(real(*args)), raising=False)
    with pytest.raises(BundleError, match="MemoryError"):
        read_tensors(copy)


def test_without_safetensors_the_page_is_still_there(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only running it again needs the library, and says which."""
    monkeypatch.setattr("gradwatch.runtime.optional_dependencies._installed", lambda module: False)
    assert main(["replay", str(copy)]) == 0
    assert main(["replay", str(copy), "--script", "tests.incidents.bundle.cases:build"]) == 2
    assert "pip install 'gradwatch[bundle]'" in capsys.readouterr().err
    with pytest.raises(MissingDependencyError):
        load_tensors(copy / "tensors.safetensors")


def mutated(raw: bytes, dice: random.Random) -> bytes:
    """Bytes spoilt in one of the ways a disk, a network or an enemy spoils them."""
    data = bytearray(raw)
    kind = dice.randrange(5)
    if kind == 0:
        return bytes(data[: dice.randrange(len(data))])
    for _ in range(dice.choice([1, 1, 2, 8])):
        at = dice.randrange(len(data))
        if kind == 1:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 2:
            data[at : at + dice.randrange(64)] = dice.randbytes(dice.randrange(64))
        elif kind == 3:
            data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        else:
            start = dice.randrange(len(data))
            data[at:at] = data[start : start + dice.randrange(200)]
    return bytes(data)


@pytest.mark.parametrize("name", FILES)
@settings(
    max_examples=examples(75), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(seed=st.integers(0, 1 << 32))
def test_spoilt_bytes_are_read_or_refused(name: str, seed: int, whole: Path, tmp_path: Path) -> None:
    """Truncated, flipped, zeroed, overwritten, duplicated: a value, or a BundleError that names the file."""
    spoilt = tmp_path / "spoilt"
    shutil.rmtree(spoilt, ignore_errors=True)
    shutil.copytree(whole, spoilt)
    (spoilt / name).write_bytes(mutated((whole / name).read_bytes(), random.Random(seed)))
    refusals: list[str] = []
    try:
        found = read_document(spoilt) if name == "incident.json" else read_tensors(spoilt)
        assert isinstance(found, (Document, dict))
    except BundleError as error:
        refusals.append(str(error))
    assert all(str(spoilt / name) in said for said in refusals)


def values(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        yield from values(item, (*path, key))


STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 1 << 70, 1e308, "", "x", "NaN", "\x1b[2J", "../..", [], {}, [[]], {"tensor": {}}),
    *({"tensor": {"name": "input.0.0", "stride": [0, 0], "requires_grad": True}}, {"list": [{"list": []}]}),
    *({"0": "input.0.0"}, {"99": "input.0.0"}, [{}], "input.0.0", "cuda", "site.norm"),
)


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of the document with one value exchanged."""
    if not path:
        return value
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copied


def changes(document: Any, count: int, seed: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Values anywhere in a document and something strange to put there; everything about the calls first."""
    dice = random.Random(seed)
    paths = list(values(document))
    calls = [path for path in paths if path[:1] in (("calls",), ("models",))]
    for _ in range(count):
        yield dice.choice(calls if dice.random() < 0.7 else paths), dice.choice(STRANGE)


STARTS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect"}


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 60))])
def test_a_document_with_anything_in_it_is_run_again_or_refused(
    seed: int, copy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Well-formed, but with a strange value somewhere: exit 0, 1 or 2, never a traceback, nothing run or written."""
    failed = tmp_path / "failed"
    # In a child: an audit hook is never taken away again, and every `id()` of the tests behind this one would call it.
    if child := os.fork():
        os.waitpid(child, 0)
        assert failed.read_text(encoding="utf-8") == ""
        return
    try:
        torch.set_num_threads(1)  # the threads of OpenMP are not forked: a sum that waits for them never ends
        with_strange_values(seed, copy, capsys)
        failed.write_text("")
    except BaseException:
        failed.write_text(traceback.format_exc())
    finally:
        os._exit(0)


def with_strange_values(seed: int, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = json.loads((copy / "incident.json").read_text(encoding="utf-8"))
    seen: list[str] = []
    sys.addaudithook(lambda event, args: seen.append(event) if event in STARTS else None)
    statuses = set()
    for path, value in changes(plain, 60, seed):
        (copy / "incident.json").write_text(json.dumps(replaced(plain, path, value)))
        state = random.getstate()
        status, _ = replayed(copy, capsys)
        assert status in (0, 1, 2), (path, value)
        assert random.getstate() == state, (path, value)
        statuses.add(status)
    assert seen == []
    assert statuses >= {0, 2}


@pytest.mark.parametrize("what", ["python", "numpy", "cpu"])
@pytest.mark.parametrize("state", ["empty", "too long", "no bytes"])
def test_the_state_of_a_generator_is_tried_before_it_is_used(
    what: str, state: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong one is refused, and the generators of the process never see it."""
    bytes_ = {"empty": torch.zeros(0), "too long": torch.full((2504,), 255), "no bytes": torch.ones(3)}[state]
    tensors = read_tensors(copy)
    tensors[f"generator.0.{what}"] = bytes_ if state == "no bytes" else bytes_.to(torch.uint8)
    save_file(tensors, copy / "tensors.safetensors")
    seeded()
    build()
    expected = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    seeded()
    status, said = replayed(copy, capsys)
    assert status == 2
    assert "generator" in said
    assert torch.equal(expected[0], torch.get_rng_state())
    assert expected[1:] == (random.getstate(), str(np.random.get_state()))


def test_inputs_that_were_changed_are_found_out(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hash of the batch stands in the document: a step of other inputs would be another step."""
    tensors = read_tensors(copy)
    tensors["input.0.0"][1, 1] += 1
    save_file(tensors, copy / "tensors.safetensors")
    status, said = replayed(copy, capsys)
    assert status == 2
    assert "calls.0: its inputs have the hash" in said


def test_the_page_of_a_foreign_bundle_is_harmless(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences, newlines and markup anywhere in it: one printable line each."""
    found = json.loads((copy / "incident.json").read_text(encoding="utf-8"))
    nasty = "\x1b[2J\x07 <script>alert(1)</script>\n# heading\u202e"
    found["incident"]["name"] = found["incident"]["event"]["summary"] = nasty
    found["incident"]["finding"]["op"] = found["incident"]["finding"]["note"] = nasty
    found["incident"]["finding"]["frames"][0]["source"] = nasty
    found["left_out"] = [{"name": nasty, "nbytes": 1, "why": nasty}]
    found["obstacle"] = nasty
    (copy / "incident.json").write_text(json.dumps(found))
    assert main(["replay", str(copy)]) == 0
    told = capsys.readouterr().out
    assert all(line.isprintable() for line in told.splitlines())
    assert "\\x1b[2J" in told
    assert not any(line.startswith("# heading") for line in told.splitlines())
