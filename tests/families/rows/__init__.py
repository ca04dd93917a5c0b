"""The rows, by kind of family."""

from tests.families.rows import experts, gemma4, layer_norm, norms, others, recurrent, served, wrappers

ROWS = (
    *served.ROWS,
    *norms.ROWS,
    *layer_norm.ROWS,
    *experts.ROWS,
    *gemma4.ROWS,
    *recurrent.ROWS,
    *others.ROWS,
    *wrappers.ROWS,
)
