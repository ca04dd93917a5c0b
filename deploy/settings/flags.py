"""A flag for each setting."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from .fields import Kind, SettingField, groups_of
from .values import full_name, number_and_words, number_parser


def add_flags(parser: argparse.ArgumentParser, kinds: Iterable[Kind], *, omit: frozenset[str] = frozenset()) -> None:
    """Adds a flag for each field, in groups. A flag that is not given sets nothing in the namespace."""
    for kind in kinds:
        for title, fields in groups_of(kind).items():
            group = parser.add_argument_group(title)
            for field in fields:
                if field.info.has_flag and field.name not in omit:
                    _add_flag(group, field)


def _add_flag(group: argparse._ArgumentGroup, field: SettingField) -> None:
    hint, default = field.hint, field.default
    text = field.info.help.replace("%", "%%") + (f" (default: {default})" if default not in (None, ()) else "")
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is Literal:
        options.update(choices=typing.get_args(hint), type=partial(full_name, field.info))
    elif typing.get_origin(hint) is tuple:
        options.update(action="append", metavar="TEXT")
    else:
        number, words = number_and_words(hint)
        metavar = "|".join([{int: "N", float: "X"}.get(number, "TEXT"), *words])
        options.update(type=number_parser(number, words), metavar=metavar)
    group.add_argument(field.flag, **options)
