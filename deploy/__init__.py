"""What stands in front of a pipeline: the command line, the HTTP server and its metrics."""
