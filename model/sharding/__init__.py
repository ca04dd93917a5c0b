"""One model over several ranks: what each rank holds of the weights, and how ranks add, gather and send results.

Owns: the cut of every tensor and adapter, the split of the layers, and sums, gathers and sends between ranks.
In: a model's spec, and the rank's number.
Out: the spec of a rank's share, the rows and columns of each tensor or the range of layers, a `Comm`.
Imports: `model`'s own files, `model/families`, `model/checkpoint`, `model/lora`.
Start with: `shard.py` for shares of every layer, `layer_split.py` for ranges of layers, `rank_grid.py` for both.
"""
