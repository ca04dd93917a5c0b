"""Every operation of the API in one table: method, path, what goes in, what comes out, and whose key opens it.

The OpenAPI document is made from it, and a test holds it to the routes of the server: a new route takes a new entry, in
the file of its kind.
"""

from __future__ import annotations

from .admin import ADMIN
from .embeddings import NUMBERS
from .generation import GENERATION
from .messages import MESSAGES
from .operation import Content, Operation
from .responses import RESPONSES
from .server import PAGES, SERVER

__all__ = ["OPERATIONS", "Content", "Operation"]

OPERATIONS: tuple[Operation, ...] = (*GENERATION, *NUMBERS, *RESPONSES, *MESSAGES, *SERVER, *PAGES, *ADMIN)
