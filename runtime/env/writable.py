"""Whether files can be written at a place, found out before they are needed."""

from __future__ import annotations

import tempfile
from pathlib import Path

PROBE = b"\0" * 4096  # an empty file fits a full disk


def folder_problem(folder: Path) -> str | None:
    """Why no file can be written into this folder, which is made if it is missing; None if one can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(PROBE)
            probe.flush()
    except FileExistsError:
        return "is a file, and must be a folder"
    except NotADirectoryError:
        return "lies below a file, and must be a folder"
    except OSError as error:
        return f"{error.strerror}; must be a folder in which this user can write"
    return None


def file_problem(file: Path) -> str | None:
    """Why this file cannot be written, or another with a number behind its name; None if it can."""
    if file.is_dir():
        return "is a folder, and must be a file"
    if not file.parent.exists():
        return f"the folder {file.parent} does not exist; make it, or name another file"
    problem = folder_problem(file.parent)
    return None if problem is None else f"{file.parent} {problem}"
