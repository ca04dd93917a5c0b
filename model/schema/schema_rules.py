"""Grammar rules for JSON schemas with numbers that the schema compiler does not get right: see `exact_numbers.py`.

Only what leads to such a number is written as rules here. All other parts of a schema stay with the compiler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .exact_numbers import (
    BOUNDS,
    UnsupportedBesideNumber,
    is_inexact,
    may_be_endless,
    number_pattern,
    with_nearer_bounds,
)
from .schema_keywords import map_schemas, target_of

Schema = dict[str, Any]

TYPES = ("null", "boolean", "number", "string", "array", "object")
# type -> the keywords that constrain it
KEYWORDS = {
    "number": {*BOUNDS, "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"}
    | {"minContains", "maxContains", "unevaluatedItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "minProperties"}
    | {"maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"},
}


CONSTRAINING = set.union(*KEYWORDS.values()) | {
    *("type", "enum", "const", "$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    "dependencies",
}


def schema_rules(schema: Any, spacing: Mapping[str, Any]) -> str | None:
    """The rules of a schema; None if the compiler gets all of it right.

    `spacing` has the compiler's options for strings and white space. Raises `UnsupportedBesideNumber`.
    """
    rules = _Rules(schema, spacing)
    if not rules.is_special(schema):
        return None
    lines = [f"start: {rules.rule(schema)}", *rules.lines]
    if "whitespace_pattern" in spacing:
        lines += ['%llguidance {"ignore_once": true}', f"%ignore /{spacing['whitespace_pattern']}/"]
    return "\n".join(lines)


class _Rules:
    def __init__(self, root: Any, spacing: Mapping[str, Any]) -> None:
        self._root = root
        self._spacing = spacing
        self._item = _literal(str(spacing.get("item_separator", ",")))
        self._colon = _literal(str(spacing.get("key_separator", ":")))
        self._names: dict[str, str] = {}  # of rules, by schema or reference
        self._special: dict[tuple[str, bool], bool] = {}  # of references
        self.lines: list[str] = []

    # -- which parts

    def is_special(self, schema: Any, is_exact: bool = False) -> bool:
        """Whether a number in a schema must be written here; with `is_exact`, whether it would change elsewhere."""
        if not isinstance(schema, dict):
            return False
        values = [schema[key] for key in ("const", *BOUNDS) if key in schema]
        values += schema["enum"] if isinstance(schema.get("enum"), list) else []
        if any(is_inexact(value) for value in values) or (not is_exact and may_be_endless(schema)):
            return True
        if any(self.is_special(inner, is_exact) for inner in _inner(schema)):
            return True
        return isinstance(schema.get("$ref"), str) and self._refers_to_special(schema["$ref"], is_exact)

    def _refers_to_special(self, reference: str, is_exact: bool) -> bool:
        key = (reference, is_exact)
        if key not in self._special:
            self._special[key] = False  # for a reference to itself
            self._special[key] = self.is_special(target_of(self._root, reference), is_exact)
        return self._special[key]

    # -- rules

    def rule(self, schema: Any) -> str:
        """The name of the rule for a schema."""
        key = json.dumps(schema)
        if key not in self._names:
            name = self._names[key] = f"r{len(self._names)}"
            self.lines.append(f"{name}: {self._body(schema)}")
        return self._names[key]

    def _body(self, schema: Any) -> str:
        if not self.is_special(schema):
            return self._compiled(schema)
        try:
            return self._special_body(schema)
        except UnsupportedBesideNumber as unsupported:
            if not self.is_special(schema, is_exact=True):
                return self._compiled(schema)
            try:
                return self._compiled(schema, with_nearer_bounds)
            except UnsupportedBesideNumber:
                raise unsupported from None

    def _special_body(self, schema: Schema) -> str:
        given = {key: value for key, value in schema.items() if key in CONSTRAINING}
        for key in ("enum", "const"):
            if key in given:
                return self._values(given, given["enum"] if key == "enum" else [given["const"]], key)
        if "$ref" in given:
            _only(given, "$ref")
            return self.rule(target_of(self._root, given["$ref"]))
        for key in ("anyOf", "oneOf"):
            if key in given:
                return self._alternatives(given, key)
        if "allOf" in given:
            _only(given, "allOf", "type")
            if len(given["allOf"]) != 1:
                raise UnsupportedBesideNumber("allOf of several schemas")
            return self.rule(given["allOf"][0])
        return self._types(given)

    def _compiled(self, schema: Any, change: Callable[[Any], Any] = lambda schema: schema) -> str:
        """A schema as the compiler takes it, with the definitions to which it may refer."""
        schema = {} if schema is True else schema
        if schema is False:
            raise UnsupportedBesideNumber("the schema false")
        shared = {key: self._root[key] for key in ("$schema", "$defs", "definitions") if key in self._root}
        return "%json " + json.dumps(change(shared | schema) | {"x-guidance": self._spacing}, ensure_ascii=False)

    def _values(self, given: Schema, values: list[Any], key: str) -> str:
        _only(given, key, "type")
        kept = [value for value in values if _is_of_type(value, given.get("type"))]
        if not kept:
            raise UnsupportedBesideNumber(f"{key} of another type")
        separators = (str(self._spacing.get("item_separator", ",")), str(self._spacing.get("key_separator", ":")))
        return " | ".join(_literal(_written(value, separators)) for value in kept)

    def _alternatives(self, given: Schema, key: str) -> str:
        _only(given, key, "type")
        each = given[key]
        if key == "oneOf" and not _are_disjoint(each):
            raise UnsupportedBesideNumber("oneOf of schemas that may overlap")
        if "type" in given:
            each = [one if not isinstance(one, dict) else {"type": given["type"]} | one for one in each]
        return " | ".join(self.rule(one) for one in each)

    def _types(self, given: Schema) -> str:
        named = given.get("type", list(TYPES))
        bodies, plain = [], []
        for name in [named] if isinstance(named, str) else named:
            own = KEYWORDS.get("number" if name == "integer" else name, set())
            alone = {"type": name} | {key: value for key, value in given.items() if key in own}
            if self.is_special(alone):
                make = {"object": self._object, "array": self._array}.get(name, self._number)
                bodies.append(make(alone))
            else:
                plain.append(name)
        if plain:
            bodies.append(self._compiled(given | {"type": plain}))
        return " | ".join(bodies)

    def _number(self, given: Schema) -> str:
        _only(given, "type", *BOUNDS)
        return f"/{number_pattern(given)}/"

    def _array(self, given: Schema) -> str:
        _only(given, "type", "items", "prefixItems", "minItems", "maxItems")
        first, least, most = given.get("prefixItems", []), given.get("minItems", 0), given.get("maxItems")
        others = given.get("items", True)
        if isinstance(others, list) or not isinstance(first, list):
            raise UnsupportedBesideNumber("items as a list")
        if others is False and least > len(first):
            raise UnsupportedBesideNumber("minItems that no array fits")
        places = [self.rule(one) for one in (first if first or others is False else [others])][:most]
        tail = ""
        if others is not False and (most is None or most > len(places)):
            up_to = "" if most is None else most - len(places)
            tail = f"({self._item} {self.rule(others)}){{{max(least - len(places), 0)},{up_to}}}"
        for index in reversed(range(len(places))):
            place = f"{self._item} {places[index]} {tail}" if index else f"{places[0]} {tail}"
            tail = place if index < least else f"({place})?"
        return f'"[" {tail} "]"'

    def _object(self, given: Schema) -> str:
        _only(given, "type", "properties", "required", "additionalProperties")
        properties, required = given.get("properties", {}), given.get("required", [])
        others = given.get("additionalProperties", True)
        members = []
        for name in dict.fromkeys([*properties, *required]):
            value = properties.get(name, others)
            if value is False and name not in required:
                continue
            members.append(
                (f"{_literal(json.dumps(name, ensure_ascii=False))} {self._colon} {self.rule(value)}", name in required)
            )
        if others is not False:
            members.append((self._other_members(properties, required, others), False))
        return f'"{{" {self._members(members)} "}}"'

    def _other_members(self, properties: Iterable[str], required: Iterable[str], others: Any) -> str:
        """Members with other names. No `\\u` escape can spell a name that is taken, as names are without them."""
        taken = " | ".join(
            _literal(json.dumps(name, ensure_ascii=False)) for name in dict.fromkeys([*properties, *required])
        )
        name = f"K{len(self.lines)}"
        text = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'
        self.lines.append(f"{name}: {text}" + (f" & ~({taken})" if taken else ""))
        member = f"{name} {self._colon} {self.rule(others)}"
        return f"{member} ({self._item} {member})*"

    def _members(self, members: list[tuple[str, bool]]) -> str:
        """All members in their order, with separators between those that are there."""
        if not members:
            return ""
        after = ""  # what follows a member that is there, and
        alone = ""  # what follows none
        for member, is_required in reversed(members):
            alone_next = f"{member} {after}" if is_required or not alone else f"({member} {after} | {alone})"
            if not is_required and not alone:
                alone_next = f"({alone_next})?"
            rule = f"m{len(self.lines)}"
            self.lines.append(
                f"{rule}: " + (f"{self._item} {member}" if is_required else f"({self._item} {member})?") + f" {after}"
            )
            after, alone = rule, alone_next
        return alone


# -- parts


def _inner(schema: Schema) -> Iterable[Any]:
    """The schemas in a schema, but for its definitions."""
    found: list[Any] = []
    without = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    map_schemas(without, found.append)
    return found


def _only(given: Schema, *known: str) -> None:
    """Raises `UnsupportedBesideNumber` for a keyword that constrains, other than the known ones."""
    for key in given:
        if key not in known and key in CONSTRAINING:
            raise UnsupportedBesideNumber(key)


def _is_of_type(value: Any, named: Any) -> bool:
    names = [named] if isinstance(named, str) else named
    if names is None:
        return True
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {"integer": is_number and value == value // 1, "number": is_number, "null": value is None}
    kinds |= {"boolean": isinstance(value, bool), "string": isinstance(value, str)}
    kinds |= {"array": isinstance(value, list), "object": isinstance(value, dict)}
    return any(kinds.get(name, False) for name in names)


def _are_disjoint(schemas: list[Any]) -> bool:
    """Whether it is certain, by types and values alone, that no value fits two of the schemas."""
    sets = [(_types_of(schema), _values_of(schema)) for schema in schemas]
    for at, (types, values) in enumerate(sets):
        for other_types, other_values in sets[:at]:
            both_listed = values is not None and other_values is not None
            if values & other_values if both_listed else types & other_types:  # type: ignore[operator]
                return False
    return True


def _values_of(schema: Any) -> set[str] | None:
    """The values of a schema that lists them."""
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _types_of(schema: Any) -> set[str]:
    schema = schema if isinstance(schema, dict) else {}
    named = schema.get("type", TYPES)
    if (values := _values_of(schema)) is not None and "type" not in schema:
        named = [name for name in TYPES if any(_is_of_type(json.loads(value), name) for value in values)]
    names = [named] if isinstance(named, str) else named
    return {"number" if name == "integer" else name for name in names}


def _written(value: Any, separators: tuple[str, str]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=separators)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
