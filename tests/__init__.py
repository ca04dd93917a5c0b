"""Tests. A folder with an `__init__.py` has servers that live as long as its tests run (scope "package")."""
