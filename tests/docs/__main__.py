"""Write the generated pages: python -m tests.docs"""

from __future__ import annotations

from tests.docs.generated import DOCS, GENERATED


def main() -> None:
    for name, made in GENERATED.items():
        (DOCS / name).write_text(made())


if __name__ == "__main__":
    main()
