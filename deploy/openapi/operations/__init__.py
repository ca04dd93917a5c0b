"""The table of all operations of the API: method, path, parameters, body, answers, errors and access.

The OpenAPI document is made from it. A test compares it with the routes of the server: a new route needs a new entry,
in the file of its kind.

Owns: nothing.
In: the bodies of each API, and the shapes of answers.
Out: `OPERATIONS`.
Imports: the root of `deploy`, `metrics`, `api/schema`, each API, `inspect`, `admin`, `openapi/shapes`.
Start with: `operation.py`, then `generation.py`.
"""

from __future__ import annotations

from .admin import ADMIN
from .embeddings import NUMBERS
from .generation import GENERATION
from .messages import MESSAGES
from .ollama import OLLAMA
from .operation import Content, Operation
from .responses import RESPONSES
from .server import PAGES, SERVER

__all__ = ["OPERATIONS", "Content", "Operation"]

OPERATIONS: tuple[Operation, ...] = (*GENERATION, *NUMBERS, *RESPONSES, *MESSAGES, *OLLAMA, *SERVER, *PAGES, *ADMIN)
