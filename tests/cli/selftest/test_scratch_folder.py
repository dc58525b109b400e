"""The copy of the working folder: what is in it, what is not, what is linked."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwatch.cli.selftest.scratch_folder import LARGEST_FILE, copy_folder
from gradwatch.errors import GradwatchError


def test_small_files_are_copied_and_large_ones_named(tmp_path: Path) -> None:
    """Folders keep their shape; virtual environments, git and former runs stay where they are."""
    source, target = tmp_path / "source", tmp_path / "target"
    for name in (
        "train.py",
        "pkg/model.py",
        ".git/config",
        "gradwatch-runs/x",
        "env/pyvenv.cfg",
        "env/lib.py",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "data.bin").write_bytes(bytes(LARGEST_FILE + 1))
    copied = copy_folder(source, target, [])
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*.*")) == [
        "pkg/model.py",
        "train.py",
    ]
    assert (copied.files, copied.left_out) == (2, ["data.bin"])
    assert copied.by_rule == [".git", "env", "gradwatch-runs"]


def test_links_to_folders_are_named(tmp_path: Path) -> None:
    """They are not followed, wherever they lead; one that is asked for is linked and not named."""
    source, target = tmp_path / "source", tmp_path / "target"
    (tmp_path / "big" / "part").mkdir(parents=True)
    (source / "sub").mkdir(parents=True)
    (source / "data").symlink_to(tmp_path / "big")
    (source / "sub" / "more").symlink_to(tmp_path / "big")
    assert copy_folder(source, target, []).symlinks == ["data", "sub/more"]
    assert copy_folder(source, tmp_path / "again", ["data"]).symlinks == ["sub/more"]
    assert (tmp_path / "again" / "data" / "part").is_dir()


def test_what_is_asked_for_is_linked(tmp_path: Path) -> None:
    """A large file, or a folder below another; neither is copied."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "data" / "raw").mkdir(parents=True)
    (source / "data" / "raw" / "x").write_text("x")
    (source / "big").write_bytes(bytes(LARGEST_FILE + 1))
    copied = copy_folder(source, target, ["data/raw", "big"])
    assert (target / "data" / "raw").is_symlink()
    assert (target / "big").is_symlink()
    assert (copied.files, copied.left_out) == (0, [])


@pytest.mark.parametrize("link", ["none", "../x", "/etc"])
def test_a_link_to_nothing_is_refused(tmp_path: Path, link: str) -> None:
    """Or to something that is not below the folder."""
    tmp_path.joinpath("source").mkdir()
    with pytest.raises(GradwatchError, match="no such file or folder below"):
        copy_folder(tmp_path / "source", tmp_path / "target", [link])


@pytest.mark.parametrize("links", [["."], ["sub/.."], [""]])
def test_the_whole_folder_is_not_linked(tmp_path: Path, links: list[str]) -> None:
    """It would be no copy: that is refused in a sentence."""
    (tmp_path / "source" / "sub").mkdir(parents=True)
    with pytest.raises(GradwatchError, match="that is the whole folder"):
        copy_folder(tmp_path / "source", tmp_path / "target", links)


def test_a_link_within_a_link_is_refused(tmp_path: Path) -> None:
    """Nothing is linked into the user's own folder; the same folder twice is fine."""
    (tmp_path / "source" / "lk" / "in").mkdir(parents=True)
    with pytest.raises(GradwatchError, match="--link lk/in: it lies in lk, which is linked as well"):
        copy_folder(tmp_path / "source", tmp_path / "target", ["lk", "lk/in"])
    assert copy_folder(tmp_path / "source", tmp_path / "target", ["lk", "lk/"]).files == 0
