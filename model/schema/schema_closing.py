"""Closes the objects of a JSON schema that do not say whether they may have keys that they do not name.

A schema that names an object's keys rarely means that any others may follow, and a model that may invent keys goes on
inventing them. `additionalProperties: true` keeps an object open, and so does a schema that names no keys at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .schema_keywords import map_schemas, target_of

Schema = dict[str, Any]
Keys = dict[str, None]  # in their order

ALTERNATIVES = ("anyOf", "oneOf")
NAMING = ("properties", "patternProperties")


def closed(schema: Any) -> Any:
    """The schema with its objects closed.

    An object that is described in several places (`allOf`, `$ref` beside `properties`) is closed as a whole. It stays
    open where one of the places says that other keys may follow, or where its keys cannot be told.
    """
    if not isinstance(schema, dict):
        return schema
    closing = _Closing(schema)
    root = closing.object(schema, {})
    return root | {"$defs": root.get("$defs", {}) | closing.parts} if closing.parts else root


class _Closing:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._part_names: dict[str, str] = {}  # by reference
        self.parts: dict[str, Any] = {}  # copies of definitions that describe a part of an object, by name in `$defs`

    def schema(self, schema: Any) -> Any:
        """A schema that stands alone."""
        return self.object(schema, {}) if isinstance(schema, dict) else schema

    def object(self, schema: Schema, outer: Keys) -> Schema:
        """A schema that stands alone, or an alternative for an object that has the keys `outer` beside."""
        if not outer and _is_wrapper(schema):
            return self._inside(schema)
        names = self._keys_of(schema)
        if names is None:
            return self._part(schema)
        if not (outer or names or any(key in schema for key in NAMING)):
            return self._inside(schema)
        names = outer | names | dict.fromkeys(self._required_by(schema))
        given = [key for key in ALTERNATIVES if isinstance(schema.get(key), list)]
        minimum = schema.get("minProperties", 0)
        if len(given) > 1 or (isinstance(minimum, int) and minimum > len(names)):
            return self._part(schema)
        result = self._part(schema, without=tuple(given))
        result.pop("unevaluatedProperties", None)
        for key in given:
            result[key] = [self.object(one, names) if isinstance(one, dict) else one for one in schema[key]]
        if given:
            return result
        own: Schema = result.get("properties", {})
        others = {name: True for name in names if name not in own}
        return result | {"properties": own | others, "additionalProperties": False}

    def _part(self, schema: Schema, without: tuple[str, ...] = ()) -> Schema:
        """A schema that describes a part of an object: closed inside its properties, but not itself."""
        lists = [key for key in ("allOf", *ALTERNATIVES) if isinstance(schema.get(key), list)]
        result = self._inside(schema, except_for=(*lists, "$ref"))
        for key in lists:
            if key not in without:
                result[key] = [self._part(one) if isinstance(one, dict) else one for one in schema[key]]
        if isinstance(schema.get("$ref"), str):
            result["$ref"] = self._reference_to_part(schema["$ref"])
        return result

    def _inside(self, schema: Schema, except_for: tuple[str, ...] = ()) -> Schema:
        """The schema with those in it closed, each as one that stands alone; keywords keep their order."""
        changed = map_schemas({key: value for key, value in schema.items() if key not in except_for}, self.schema)
        return {key: changed.get(key, value) for key, value in schema.items()}

    def _reference_to_part(self, reference: str) -> str:
        target = target_of(self._root, reference)
        if not isinstance(target, dict):
            return reference
        name = self._part_names.get(reference)
        if name is None:
            name = self._part_names[reference] = f"part-of-an-object-{len(self._part_names)}"
            self.parts[name] = self._part(target)
        return f"#/$defs/{name}"

    def _keys_of(self, schema: Schema, seen: frozenset[str] = frozenset()) -> Keys | None:
        """The keys that a schema names for its object, but for those of its alternatives; None if any may follow."""
        if "additionalProperties" in schema or schema.get("unevaluatedProperties", False) is not False:
            return None
        names: Keys = dict.fromkeys(schema["properties"]) if isinstance(schema.get("properties"), dict) else {}
        for reference, part in self._parts_of(schema):
            if reference in seen:
                continue
            if not isinstance(part, dict) or any(key in part for key in (*ALTERNATIVES, "patternProperties")):
                return None
            found = self._keys_of(part, seen | {reference} if reference else seen)
            if found is None:
                return None
            names |= found
        return names

    def _required_by(self, schema: Schema, seen: frozenset[str] = frozenset()) -> Iterable[str]:
        """The keys that a schema and its parts require; most are among those that it names."""
        for name in schema["required"] if isinstance(schema.get("required"), list) else ():
            if isinstance(name, str):
                yield name
        for reference, part in self._parts_of(schema):
            if isinstance(part, dict) and reference not in seen:
                yield from self._required_by(part, seen | {reference} if reference else seen)

    def _parts_of(self, schema: Schema) -> Iterator[tuple[str, Any]]:
        """The schemas that describe the same object; those by reference with it, the others with ""."""
        for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield "", one
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"], target_of(self._root, schema["$ref"])


def _is_wrapper(schema: Schema) -> bool:
    """Whether a schema is one other, perhaps with annotations, so that closing that one closes it."""
    if any(key in schema for key in ("required", *NAMING, *ALTERNATIVES)):
        return False
    num_others = len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0
    return num_others + ("$ref" in schema) == 1
