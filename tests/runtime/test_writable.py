"""Folders and files that can or cannot be written, found out in advance."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from millrace.runtime.env.writable import file_problem, folder_problem


def test_a_folder_is_made_for_its_owner_only_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert folder_problem(folder) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"), [("file", "is a file"), ("file/below", "below a file"), ("/proc/none", "in which this user can")]
)
def test_a_place_that_can_be_no_folder_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    assert words in (folder_problem(tmp_path / name) or "")


@pytest.mark.parametrize(
    ("name", "words"), [("", "is a folder"), ("none/file", "does not exist"), ("file/below", "file is a file")]
)
def test_a_place_that_can_be_no_file_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    assert words in (file_problem(tmp_path / name) or "")


def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    assert file_problem(file) is None and file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]
