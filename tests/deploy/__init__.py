"""What the servers do over real sockets and in Chromium."""
