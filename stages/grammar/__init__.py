"""Answers of a given form: grammars compiled beside the loop, and the masks they put on a step's logits."""
