"""Files are replaced whole or not at all, without following links, and read only where they are regular."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.runtime.atomic_files import read_regular, replacing, write_named, write_whole


def test_a_fault_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """What is raised in the block goes on; the file is as before, and no temporary stays."""
    path = tmp_path / "state.json"
    write_whole(path, "old")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"new, but only in p")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    """A reader never sees half of the new content, not even after kill -9."""
    path = tmp_path / "state.json"
    write_whole(path, "old")
    code = (
        "import os, signal, sys\n"
        "from gradwatch.runtime.atomic_files import replacing\n"
        "with replacing(sys.argv[1]) as file:\n"
        "    file.write(b'new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text(encoding="utf-8") == "old"


def test_permissions_are_those_asked_for(tmp_path: Path) -> None:
    """`mode`, less the umask, also where the old file had others."""
    path = tmp_path / "state.json"
    path.write_text("old")
    path.chmod(0o666)
    write_whole(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_whole(path, "new", 0o644)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~_umask()


def test_links_are_replaced_and_never_written_through(tmp_path: Path) -> None:
    """A link in the place of the file, or of the named temporary, does not lead the content elsewhere."""
    outside, path, part = tmp_path / "outside", tmp_path / "state.json", tmp_path / "state.json.part"
    outside.write_text("kept")
    path.symlink_to(outside)
    write_whole(path, "new")
    assert not path.is_symlink()
    part.symlink_to(outside)
    with (
        pytest.raises(OSError, match=r"symbolic link|Too many"),
        replacing(path, temporary=str(part)) as file,
    ):
        file.write(b"elsewhere")
    assert (outside.read_text(encoding="utf-8"), path.read_text(encoding="utf-8")) == ("kept", "new")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A FIFO, which would wait for a writer, and a link are refused; of a file no more is read than allowed."""
    (tmp_path / "file").write_text("12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    assert read_regular(tmp_path / "file", 3) == b"123"
    for name in ("link", "fifo"):
        with pytest.raises(OSError, match=r"not a regular file|symbolic link|Too many"):
            read_regular(tmp_path / name, 3)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_a_file_that_a_user_names_is_a_new_or_a_regular_one(tmp_path: Path, kind: str) -> None:
    """Anything else is refused with the reason, and is there as it was; a regular file keeps its permissions."""
    path, other = tmp_path / "named", tmp_path / "other"
    other.write_text("kept")
    other.chmod(0o640)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(other if kind == "link" else tmp_path / "nothing")
    before = path.lstat().st_mode
    with pytest.raises(OSError, match=f"it is a {kind.split()[0]}"):
        write_named(path, "new")
    assert path.lstat().st_mode == before
    assert sorted(os.listdir(tmp_path)) == ["named", "other"]
    assert other.read_text() == "kept"
    write_named(other, "new")
    assert (other.read_text(), stat.S_IMODE(other.stat().st_mode)) == ("new", 0o640)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
