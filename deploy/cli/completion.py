"""`millrace completion bash | zsh | fish`: a script that completes commands, flags and their values.

Made from the parsers of the commands, so it has what `--help` lists.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...stages.config import EngineConfig
from ..config import ServerConfig

HELP_CHARS = 80  # of a flag, in shells that show it


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command."""

    name: str
    help: str
    has_value: bool
    values: tuple[str, ...] = ()  # empty: any, so files are offered


@dataclass(frozen=True, slots=True)
class CommandWords:
    """What may follow the words of a command."""

    words: str  # "", "serve", "bench latency", ...
    commands: Mapping[str, str]  # commands below it -> help
    flags: tuple[Flag, ...]


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command."""
    from .main import make_parser

    print(SHELLS[options.shell](list(commands_of(make_parser()))), end="")
    return 0


def commands_of(parser: argparse.ArgumentParser, words: str = "") -> Iterator[CommandWords]:
    """The command of a parser and those below it."""
    below: dict[str, argparse.ArgumentParser] = {}
    helps: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below |= action.choices
            helps |= {choice.dest: choice.help or "" for choice in action._choices_actions}
    yield CommandWords(words, {name: helps.get(name, "") for name in below}, tuple(_flags(parser)))
    for name, its_parser in below.items():
        yield from commands_of(its_parser, f"{words} {name}".strip())


def _flags(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    for action in parser._actions:
        text = (action.help or "").replace("%%", "%").split(";")[0].partition(" (default")[0]
        values = tuple(map(str, action.choices)) if action.choices and action.option_strings else ()
        for name in action.option_strings:
            yield Flag(name, text[:HELP_CHARS], action.nargs != 0, values)


# -- shells


def bash(commands: list[CommandWords]) -> str:
    """A function for `complete`; where no word fits, bash offers files."""
    return f"""# bash completion of millrace: source <(millrace completion bash)
_millrace() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command="" words="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$command ${{COMP_WORDS[i]}}" in
{_descents(commands, "      {pattern}) command={words} ;;")}
    esac
  done
  if [[ $prev == "=" ]]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; elif [[ $cur == "=" ]]; then
    prev=${{COMP_WORDS[COMP_CWORD-1]}} cur=""; fi
  COMPREPLY=()
  case "$command $prev" in
{_values(commands, '    {pattern}) COMPREPLY=($(compgen -W {values} -- "$cur")); return ;;')}
  esac
  case "$command" in
{_words(commands, "    {pattern}) words={words} ;;")}
  esac
  if [[ $cur == -* || -z $command || $command == bench ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); fi
}}
complete -o default -F _millrace millrace
"""


def zsh(commands: list[CommandWords]) -> str:
    """A function for `compdef`."""
    return f"""#compdef millrace
# zsh completion of millrace: source <(millrace completion zsh), after compinit
_millrace() {{
  local cur=${{words[CURRENT]}} prev=${{words[CURRENT-1]}} command="" i
  for ((i = 2; i < CURRENT; i++)); do
    case "$command ${{words[i]}}" in
{_descents(commands, "      ({pattern}) command={words} ;;")}
    esac
  done
  local -a offered
  case "$command $prev" in
{_values(commands, "    ({pattern}) offered=(${{(z):-{values}}}); compadd -a offered; return ;;")}
  esac
  case "$command" in
{_words(commands, "    ({pattern}) offered=(${{(z):-{words}}}) ;;")}
  esac
  if [[ $cur == -* || -z $command || $command == bench ]]; then compadd -a offered; else _files; fi
}}
compdef _millrace millrace
"""


def fish(commands: list[CommandWords]) -> str:
    """A line for each word, with its help."""
    lines = ["# fish completion of millrace: millrace completion fish | source"]
    for command in commands:
        where = _quoted(_seen(command, commands))
        for name, text in command.commands.items():
            lines.append(f"complete -c millrace -n {where} -f -a {name} -d {_quoted(text)}")
        for flag in command.flags:
            name = f"-l {flag.name[2:]}" if flag.name.startswith("--") else f"-s {flag.name[1:]}"
            value = "" if not flag.has_value else f" -x -a {_quoted(' '.join(flag.values))}" if flag.values else " -r"
            lines.append(f"complete -c millrace -n {where} {name}{value} -d {_quoted(flag.help)}")
    return "\n".join(lines) + "\n"


def _seen(command: CommandWords, commands: list[CommandWords]) -> str:
    """fish's condition that the words of a command have been typed, and no command below it."""
    if not command.words:
        return "__fish_use_subcommand"
    words = command.words.split()
    others = list(command.commands)  # also a command of which one below has this name, as `bench serve`
    others += [other.words for other in commands if len(words) == 1 and other.words and words[0] in other.commands]
    parts = [f"__fish_seen_subcommand_from {word}" for word in words]
    return "; and ".join(parts + [f"not __fish_seen_subcommand_from {other}" for other in others])


SHELLS: Mapping[str, Callable[[list[CommandWords]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _descents(commands: list[CommandWords], form: str) -> str:
    """A case for each word that leads to a command below."""
    cases = [(f"{command.words} {name}") for command in commands for name in command.commands]
    return "\n".join(form.format(pattern=_quoted(case), words=_quoted(case.strip())) for case in cases)


def _values(commands: list[CommandWords], form: str) -> str:
    """A case for each flag with fixed values."""
    cases = [(f"{command.words} {flag.name}", flag) for command in commands for flag in command.flags if flag.values]
    return "\n".join(form.format(pattern=_quoted(case), values=_quoted(" ".join(flag.values))) for case, flag in cases)


def _words(commands: list[CommandWords], form: str) -> str:
    """A case for each command: the commands below it, and its flags."""
    return "\n".join(
        form.format(
            pattern=_quoted(command.words),
            words=_quoted(" ".join([*command.commands, *(flag.name for flag in command.flags)])),
        )
        for command in commands
    )


def _quoted(text: Any) -> str:
    return shlex.quote(str(text)) if text else "''"
