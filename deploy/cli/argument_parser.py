"""The argument parser of all commands: flags in full, near misses named, underscores read as hyphens."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from ..settings import near_miss

_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that accepts no abbreviated flags, and says which flag or command was meant.

    A command rejects its own unknown flags, with its own usage. `--max_num_seqs` is `--max-num-seqs`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's, but unknown flags are an error."""
        parsed, unknown = super().parse_known_args(None if args is None else list(self._with_hyphens(args)), namespace)
        if unknown:
            names = (self._unknown(argument) for argument in unknown)
            self.error(f"unrecognized arguments: {' '.join(names)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, and exits with code 2."""
        choice = _INVALID_CHOICE.search(message)
        if choice is not None:
            message += near_miss(choice[1], re.findall(r"[\w.-]+", choice[2]))
        super().error(message)

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("--"):
            return argument
        return argument + near_miss(argument.partition("=")[0], self._option_string_actions)

    def _with_hyphens(self, args: Iterable[str]) -> Iterator[str]:
        for argument in args:
            flag, equals, value = argument.partition("=")
            hyphened = flag.replace("_", "-")
            known = flag.startswith("--") and flag not in self._option_string_actions
            yield hyphened + equals + value if known and hyphened in self._option_string_actions else argument
