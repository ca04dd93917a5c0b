"""An engine without a model: what its device answers, the device itself, and its text."""
