"""Which requests go to which version of a model: labels of engines, and the shares that go by them.

Owns: nothing that runs; choices are plain code, without a clock.
In: labels that engines say of themselves, and settings.
Out: the side of each request.
Imports: the root of `stages`.
Start with: `labels.py`.
"""
