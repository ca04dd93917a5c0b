"""The package `millrace` itself: public names, version, and `python -m millrace`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import millrace
import millrace.stages


def test_the_public_names_of_stages_are_those_of_millrace() -> None:
    names = {name for name in millrace.__all__ if name != "__version__"}
    assert names == set(millrace.stages.__all__)
    assert all(getattr(millrace, name) is getattr(millrace.stages, name) for name in names)


def test_the_version_is_that_of_the_distribution() -> None:
    assert millrace.__version__ == version("millrace-engine")
    assert {"LLM", "__version__"} <= set(dir(millrace))


def test_python_m_millrace_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "millrace", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"millrace {millrace.__version__}\n"), done.stderr


def test_importing_millrace_imports_no_part_of_it() -> None:
    code = "import sys, millrace; print([name for name in sys.modules if name.startswith('millrace.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
