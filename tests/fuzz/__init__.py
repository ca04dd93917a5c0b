"""Coverage-guided fuzzing of everything that reads what others wrote.

`targets.py` has a function of bytes for each reader, `corpus.py` the inputs to begin with, and every input that ever
crashed one. `python -m tests.fuzz TARGET` runs one with atheris; `test_fuzz.py` replays the corpus with some mutations.
"""
