"""Stages for millrace, served by the flag `stage` of `millrace serve`. Each file is one, and stands alone."""
