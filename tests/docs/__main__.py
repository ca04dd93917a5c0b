"""Write the generated pages: python -m tests.docs"""

from __future__ import annotations

from tests.docs import other_engines, without_torch
from tests.docs.generated import DOCS, GENERATED, ROOT


def main() -> None:
    for name, made in GENERATED.items():
        (DOCS / name).write_text(made())
    (ROOT / without_torch.FILE).write_text(without_torch.requirements())
    page = DOCS / other_engines.PAGE
    page.write_text(other_engines.with_tables(page.read_text("utf-8")))


if __name__ == "__main__":
    main()
