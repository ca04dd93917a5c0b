"""How well a loaded model predicts a text: perplexity, and the difference between two models.

Owns: nothing after it returns.
In: a text, and the settings of one model or two.
Out: a `TextScore`, or a `ModelComparison`.
Imports: the root of `stages`, `device`, `execute`, `loading`.
Start with: `perplexity.py`.
"""
