"""Recordings of what schedule and allocate were told and decided: made, read, run again, and simulated from."""
