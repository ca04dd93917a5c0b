"""The pages: generated from the code (`python -m tests.docs`) and checked against it (`tests/test_docs.py`)."""
