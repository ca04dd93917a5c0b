"""The bodies of embeddings, scores and reranking.

Field names are those of OpenAI, vLLM, Jina and Cohere. Checks that depend on the model (lengths, dimensions, whether it
embeds at all) follow at intake.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue

from ....stages.engine.pooled_requests import ScoringPairs, pooled_request
from ....stages.errors import Refused
from ....stages.messages import Request
from ....stages.pooling_params import MAX_INPUTS, MAX_PAIRS, PoolingParams
from ....stages.tasks import Task
from ...errors import ApiError
from ..openai.generation_body import ModelName
from ..openai.prompts import read_prompts
from ..schema import fields as schema_fields
from ..schema.body import Body
from ..schema.hints import NOT_NULL, OF_ANY_LENGTH, has
from ..schema.relations import Relation
from ..schema.unsupported import POOLING, Harmless


def _texts(value: Any) -> Any:
    """Converts one text, or a list of texts and `{"text": ...}` objects, to a list of texts."""
    if not isinstance(value, list):
        return [value]
    return [item["text"] if isinstance(item, dict) and set(item) == {"text"} else item for item in value]


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[
    list[Text],
    Field(min_length=1, max_length=MAX_PAIRS),
    BeforeValidator(_texts),
    WithJsonSchema(schema_fields.TEXTS),
]


class PooledBody(Body):
    """Base class of the bodies in this file."""

    FOREIGN: ClassVar[Harmless] = POOLING
    # the engine's name of a field -> the name at this endpoint
    NAMES: ClassVar[dict[str, str]] = {}

    model: ModelName = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: str | None = None
    user: Annotated[str | None, Field(max_length=512)] = None
    truncate_prompt_tokens: Annotated[int | None, WithJsonSchema(schema_fields.CUT_TEXT)] = None
    truncation_side: Annotated[Literal["left", "right"] | None, WithJsonSchema(schema_fields.TRUNCATION_SIDE)] = None

    def check(self) -> None:
        """Checks fields against each other and against bounds that are not plain."""
        super().check()
        most = self.truncate_prompt_tokens
        if most is not None and most != -1 and not 1 <= most < 2**31:
            message = f"truncate_prompt_tokens = {most}: must be -1 or from 1 to {2**31 - 1}"
            raise ApiError("invalid_value", message, param="truncate_prompt_tokens")

    def request(self, answer_id: str, tasks: frozenset[Task]) -> Request:
        """The request to the engine, for a model that supports `tasks`."""
        raise NotImplementedError

    def client_error(self, error: ApiError) -> ApiError:
        """The same error with this endpoint's names of fields."""
        return error.named(lambda name: self.NAMES.get(name, name))


class EmbeddingBody(PooledBody):
    """`POST /v1/embeddings`."""

    NAMES: ClassVar[dict[str, str]] = {"prompt": "input"}

    input: Annotated[Any, WithJsonSchema(schema_fields.INPUT)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None  # False: a text spells its own special tokens
    normalize: bool | None = None  # scale vectors to length 1; the default is what the model says, or true
    prompt_name: Annotated[str | None, Field(max_length=256)] = None  # of the model's prompts, put before each text
    cache_salt: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:=+~-]{1,128}$")] = None

    def request(self, answer_id: str, tasks: frozenset[Task]) -> Request:
        """A request for one vector per input. `ApiError` names the wrong field."""
        prompts = read_prompts(self.input, "input", MAX_INPUTS, self.add_special_tokens)
        pooling = PoolingParams(
            dimensions=self.dimensions,
            normalize=self.normalize,
            prompt_name=self.prompt_name,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )
        salt = self.cache_salt or ""
        return pooled_request(answer_id, prompts, pooling, priority=self.priority, cache_salt=salt)


class PairsBody(PooledBody):
    """Base class of scores and reranking: pairs of texts to compare."""

    # what makes a document right, for a reranker that reads it; the default is the model's own
    instruction: Annotated[str | None, Field(min_length=1)] = None

    def pairs(self) -> ScoringPairs:
        """The pairs to compare."""
        raise NotImplementedError

    def request(self, answer_id: str, tasks: frozenset[Task]) -> Request:
        """A request for one score per pair."""
        pooling = PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens, truncation_side=self.truncation_side
        )
        return self.pairs().request(answer_id, tasks, priority=self.priority, pooling=pooling)


def _pair_of(*names: str) -> JsonSchemaValue:
    return {"allOf": [has(name, NOT_NULL) for name in names]}


def _check_pair(body: ScoreBody) -> None:
    """Requires both fields of one pair of names, and none of the other pair."""
    given = [name for name in ("queries", "documents", "text_1", "text_2") if getattr(body, name) is not None]
    if given not in (["queries", "documents"], ["text_1", "text_2"]):
        missing = "text_2" if given == ["text_1"] else "text_1" if given == ["text_2"] else "queries"
        message = f"{', '.join(given) or 'no texts'}: send text_1 and text_2, or queries and documents"
        raise ApiError("missing_required_parameter", message, param=missing)


ONE_PAIR = Relation(
    {
        "anyOf": [
            _pair_of("queries", "documents") | {"properties": {"text_1": {"type": "null"}, "text_2": {"type": "null"}}},
            _pair_of("text_1", "text_2") | {"properties": {"queries": {"type": "null"}, "documents": {"type": "null"}}},
        ]
    },
    _check_pair,
)


class ScoreBody(PairsBody):
    """`POST /score`: one query for all documents, or one query per document.

    Both have two names.
    """

    RELATIONS: ClassVar[tuple[Relation, ...]] = (ONE_PAIR,)
    NAMES: ClassVar[dict[str, str]] = {"prompt": "documents"}

    queries: Texts | None = None
    documents: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None

    def check(self) -> None:
        """Checks also that queries and documents go together."""
        super().check()
        try:
            self.pairs()
        except Refused as refused:
            param = "queries" if self.text_1 is None else "text_1"
            raise ApiError(refused.code, refused.message, param=param) from None

    def pairs(self) -> ScoringPairs:
        """The queries with the documents."""
        return ScoringPairs(self.queries or self.text_1 or [], self.documents or self.text_2 or [], self.instruction)


class RerankBody(PairsBody):
    """`POST /rerank`: documents sorted by how well they answer a query, best first."""

    NAMES: ClassVar[dict[str, str]] = {"prompt": "documents"}

    query: Annotated[Text, WithJsonSchema(OF_ANY_LENGTH)]
    documents: Texts
    top_n: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None  # 0 or none: all
    return_documents: bool = True

    def pairs(self) -> ScoringPairs:
        """The query with each document."""
        return ScoringPairs([self.query], self.documents, self.instruction)
