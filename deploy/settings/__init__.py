"""Settings from flags, environment, file and defaults, in this order of precedence, with their sources.

- **Owns:** how text and YAML become values, which source counts, and how settings are shown. What a setting is (type,
  default, help, group, unit, secrecy) stands at its field, in `stages/engine_settings.py` and `deploy/config.py`.
- **In:** parsed flags, the environment, the file of `--config`.
- **Out:** `Setting` for each field, with its source; an `EngineConfig` and a `ServerConfig` made of them.
- **Imports:** `deploy/config.py`, and the configurations and errors of `stages`.
- **Start with:** `sources.py`. Then `fields.py` (the two configurations as a table), `values.py` (text and YAML to
  values), `yaml_file.py` (the file, with lines), `flags.py` (argparse), `near_miss.py` (which name was meant).
"""
