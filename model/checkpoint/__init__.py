"""A checkpoint's files: their location, the kind of model, the tensors.

Owns: Hub download and cache, safetensors headers, the expected names and shapes.
In: a folder or a Hub id.
Out: mapped tensors with checked shapes, and the checkpoint's sampling defaults.
Imports: `model`'s own files (`config`, `errors`, `files`).
Start with: `hub.py`, then `safetensors.py`.
"""
