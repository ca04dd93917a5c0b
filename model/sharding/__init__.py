"""One model over several ranks: what each rank holds of the weights, and how ranks add and gather their results.

Owns: the cut of every tensor and adapter, and the sums and gathers between ranks.
In: a model's spec, and the rank's number.
Out: the spec of a rank's share, the rows and columns of each tensor, a `Comm`.
Imports: `model`'s own files, `model/families`, `model/lora`.
Start with: `shard.py`.
"""
