"""Child processes, the link between two processes, and the helper pool.

Owns: sockets, frames, and the life of child processes; between machines also the proof of the fleet's key (`auth.py`),
TLS (`tls.py`), what strangers may cost (`handshake_turns.py`), pings and clocks (`liveness.py`); orders to a group of
processes that ends as one (`order_line.py`).
In: messages for channels that cross a process boundary; jobs for helpers.
Out: the same messages on the other side, in order; results of jobs, or an error when a job exceeds its limits.
Imports: `runtime` and its rooms `env` and `workers`.
Start with: `link.py`; `wire.py` defines how a message is encoded, `type_fields.py` what two versions share.
"""
