"""Chat templates and conversations: what real checkpoints' templates do, each construct in a few lines.

`families.py` has the templates, `conversations.py` what is rendered with each of them.
"""
