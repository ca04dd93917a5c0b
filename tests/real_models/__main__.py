"""Prints the folder of a model, which is made first if need be: `python -m tests.real_models gemma3-270m`."""

from __future__ import annotations

import argparse

from tests.real_models.models import MODELS

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", choices=MODELS)
parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
options = parser.parse_args()
model = MODELS[options.model]
if model.missing:
    parser.error(f"not installed: {', '.join(model.missing)}; tests/README.md has the commands")
print(model.folder(options.dtype))
