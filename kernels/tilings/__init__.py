"""Launch options of kernels by card and shape: how many rows, columns, warps and stages a launch is cut into.

Owns: the format of tables of tilings, the shipped table, and the predicted options where no table has measured ones.
In: a setting (`auto`, `off`, or a file), the card's name, and shapes of kernels.
Out: `Tilings`, whose options are checked.
Imports: nothing of the package; no torch.
Start with: `tables.py`; `products.py` has the shapes and options of matrix products, `predicted.py` the predictions.
"""
