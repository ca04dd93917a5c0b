"""The feed of the dashboard: what the engine does, as plain data, to whoever looks."""
