"""The rows, by kind of family."""

from tests.families.rows import layer_norm, norms, served

ROWS = (*served.ROWS, *norms.ROWS, *layer_norm.ROWS)
