"""Images, compose, systemd unit and Helm chart, checked by the tools that read them; `tools.py` says where they are."""
