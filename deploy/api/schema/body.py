"""The base class of all bodies: strict types, unsupported fields and their OpenAPI schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from . import hints
from .unsupported import Harmless


class Body(BaseModel):
    """Base class of all request bodies. Unknown fields are ignored, types are strict."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    UNSUPPORTED: ClassVar[Harmless] = {}  # fields that other servers act on: refused with 400, not ignored
    FOREIGN: ClassVar[Harmless] = {}  # the same for other servers' and other routes' fields; not in the OpenAPI schema
    INSTEAD: ClassVar[Mapping[str, str]] = {}  # such a field -> the one of this body with the same meaning
    RELATIONS: ClassVar[tuple[JsonSchemaValue, ...]] = ()  # field combinations of `check`, as JSON schemas
    LEAST_MAX_TOKENS: ClassVar[int] = 1

    def check(self) -> None:
        """Checks combinations of fields. `ApiError` names the field to change."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        hints.add_ranges(schema, cls.LEAST_MAX_TOKENS)
        schema["properties"] = hints.unsupported(cls.UNSUPPORTED) | schema["properties"]
        if cls.RELATIONS:
            schema["allOf"] = list(cls.RELATIONS)
        return reference
