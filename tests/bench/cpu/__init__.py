"""The engines a user could pick on a CPU, side by side on the same weights: `python -m tests.bench.cpu --help`."""
