"""`python -m tests.fuzz TARGET [--minutes 30] [--corpus FOLDER]`: one reader, guided by coverage (atheris).

Ends with code 1 and the input's file at the first crash, call of over 1 s, or 512 MiB of memory: put the input into
`corpus.py`. Needs `pip install atheris`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Fuzzes until the time is over."""
    import atheris

    with atheris.instrument_imports(include=["millrace"]):
        from tests.fuzz.corpus import CORPUS
        from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=30.0, metavar="X")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="where inputs that reach new code are kept")
    options = parser.parse_args()
    folder = options.corpus or Path(tempfile.mkdtemp(prefix=f"millrace-fuzz-{options.target}-"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(CORPUS[options.target]):
        (folder / f"seed-{number}").write_bytes(data)
    flags = [f"-max_total_time={round(60 * options.minutes)}", "-timeout=1", "-rss_limit_mb=512", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *flags, str(folder)], TARGETS[options.target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
