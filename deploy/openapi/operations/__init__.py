"""All operations of a server: method, path, parameters, body, answers, errors and access of each.

The OpenAPI document is made from them. They are in the folders of their routes; here are those of the server itself and
of its pages. A test compares them with the routes of the server.

Owns: nothing.
In: the list of the folders of API routes, and the shapes of answers.
Out: `all_operations`.
Imports: `metrics`, `api/schema`, `api/routes`, `inspect`, `admin`, `openapi/shapes`.
Start with: `api/schema/operation.py`, then `server.py`.
"""

from __future__ import annotations

from ...admin.operations import OPERATIONS as ADMIN
from ...api.routes import table
from ...api.schema.operation import Content, Operation
from ...inspect.operations import OPERATIONS as INSPECT
from .server import PAGES, SERVER

__all__ = ["Content", "Operation", "all_operations"]


def all_operations() -> tuple[Operation, ...]:
    """The operations, in the order of the document."""
    api = [operation for routes in table.API_ROUTES for operation in routes.operations()]
    return (*api, *SERVER, *INSPECT, *PAGES, *ADMIN)
