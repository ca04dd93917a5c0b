"""Validation of bodies, and what the OpenAPI document says of their fields.

Owns: the base of all bodies.
In: plain data.
Out: typed bodies, or one sentence that names the field.
Imports: the root of `deploy`.
Start with: `validation.py`.
"""
