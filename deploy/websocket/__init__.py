"""Many requests over one WebSocket, with flow control, and resumed after a cut."""
