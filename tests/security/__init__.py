"""Hostile input over real sockets, and the oracle that checks the server during each test."""
