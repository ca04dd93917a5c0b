"""What the trace says of a request and of the pipeline, in figures and in words."""
