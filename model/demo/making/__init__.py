"""Makes the bundled model: corpus, tokenizer, training, evaluation. Not in the wheel.

Owns: the stories, facts and sums that the model is trained on.
In: a seed.
Out: the files of `model/demo/weights`, `evaluation.json` and `loss.csv`.
Imports: torch, transformers, tokenizers.
Start with: `train.py`; run it as `python -m millrace.model.demo.making.train`.
"""
