"""The base class of all bodies: strict types, unsupported fields and their OpenAPI schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ....kernels.layout.sampling_fields import FIELDS, Kind
from . import hints
from .relations import Relation
from .unsupported import Harmless


class Body(BaseModel):
    """Base class of all request bodies. Unknown fields are ignored, types are strict."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    UNSUPPORTED: ClassVar[Harmless] = {}  # fields that other servers act on: refused with 400, not ignored
    FOREIGN: ClassVar[Harmless] = {}  # the same for other servers' and other routes' fields; not in the OpenAPI schema
    INSTEAD: ClassVar[Mapping[str, str]] = {}  # such a field -> the one of this body with the same meaning
    RELATIONS: ClassVar[tuple[Relation, ...]] = ()  # rules between fields
    LEAST_MAX_TOKENS: ClassVar[int] = 1

    def check(self) -> None:
        """Checks the relations of fields. `ApiError` names the field to change. Subclasses add other checks."""
        for relation in self.RELATIONS:
            relation.check(self)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        hints.add_ranges(schema, cls.LEAST_MAX_TOKENS)
        schema["properties"] = hints.unsupported(cls.UNSUPPORTED) | schema["properties"]
        if relations := [relation.schema for relation in cls.RELATIONS if relation.schema is not None]:
            schema["allOf"] = relations
        return reference


_TYPES: dict[Kind, Any] = {Kind.WHOLE: int | None, Kind.NUMBER: float | None, Kind.FLAG: bool | None}

if TYPE_CHECKING:

    class SamplingBody(Body):
        """The sampling fields that are numbers and flags, but `logprobs`, whose form differs between routes."""

else:
    _scalars = (field for field in FIELDS if field.kind in _TYPES and field.name != "logprobs")
    SamplingBody = create_model(
        "SamplingBody", __base__=Body, **{field.name: (_TYPES[field.kind], None) for field in _scalars}
    )
