"""The process's environment: clock, randomness, threads, cores, memory limits, log.

Owns: the `Env` through which stages reach time, randomness and threads; time limits that no standstill uses up.
In: nothing; an env is made once and passed in.
Out: time in seconds, random streams, workers, log lines.
Imports: `runtime/workers`, `runtime/device_streams`.
Start with: `env.py`.
"""
