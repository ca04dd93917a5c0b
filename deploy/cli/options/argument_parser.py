"""The argument parser of all commands: flags in full, near misses named, underscores read as hyphens."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ...settings.near_miss import near_miss

if TYPE_CHECKING:
    from ..other_engines.translation import Note

_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that accepts no abbreviated flags, and says which flag or command was meant.

    A command rejects its own unknown flags, with its own usage. `--max_num_seqs` is `--max-num-seqs`. With
    `takes_vllm_flags` those of vLLM are accepted, or refused with the reason; what is told of them goes to `notes` of
    the namespace.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.takes_vllm_flags = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's, but unknown flags are an error."""
        notes: list[Note] = []
        if args is not None:
            args = list(self._with_hyphens(args))
            if self.takes_vllm_flags:
                args, notes = self._translated(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if self.takes_vllm_flags:
            parsed.notes = notes
        if unknown:
            self.error(self._explain_unknown(unknown))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, and exits with code 2."""
        choice = _INVALID_CHOICE.search(message)
        if choice is not None:
            from ..other_engines.near_misses import COMMANDS

            if (instead := COMMANDS.get(choice[1])) is not None and "argument COMMAND" in message:
                message = f"millrace has no {choice[1]}: {instead}"
            else:
                message += near_miss(choice[1], re.findall(r"[\w.-]+", choice[2]))
        super().error(message)

    def _translated(self, args: list[str]) -> tuple[list[str], list[Note]]:
        from ..other_engines.rows import FlagError
        from ..other_engines.translation import translate

        for argument in args:  # argparse would read -hf as -h with a value
            if argument.startswith("-h") and (hint := self._hint(argument)) is not None:
                self.error(hint)
        try:
            made = translate(args, self._option_string_actions)
        except FlagError as error:
            self.error(str(error))
        return made.arguments, made.notes

    def _explain_unknown(self, unknown: Sequence[str]) -> str:
        """What to say of unknown arguments: each flag of another engine, without its value, on a line of its own."""
        names, hints, is_value = [], [], False
        for argument in unknown:
            if (hint := self._hint(argument)) is not None:
                hints.append(hint)
            elif not is_value or argument.startswith("-"):
                names.append(argument + self._near_miss(argument))
            is_value = hint is not None and "=" not in argument
        lines = [f"unrecognized arguments: {' '.join(names)}"] if names else []
        return "\n  ".join([*lines, *hints])

    def _hint(self, argument: str) -> str | None:
        """Whose flag an argument is and what to write instead; None for other arguments."""
        if not self.takes_vllm_flags or not argument.startswith("-"):
            return None
        from ..other_engines.near_misses import hint

        return hint(argument.partition("=")[0].replace("_", "-"))

    def _near_miss(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        return near_miss(flag, self._option_string_actions) if flag.startswith("--") else ""

    def _with_hyphens(self, args: Iterable[str]) -> Iterator[str]:
        for argument in args:
            flag, equals, value = argument.partition("=")
            hyphened = flag.replace("_", "-")
            known = flag.startswith("--") and flag not in self._option_string_actions
            yield hyphened + equals + value if known and hyphened in self._option_string_actions else argument
