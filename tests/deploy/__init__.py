"""Tests of the servers over real sockets and in Chromium."""
