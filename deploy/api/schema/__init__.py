"""Validation of request bodies, and the OpenAPI schema of their fields.

Owns: the base class of all bodies.
In: plain data.
Out: typed bodies, or an `ApiError` that names the field.
Imports: the root of `deploy`.
Start with: `validation.py`.
"""
