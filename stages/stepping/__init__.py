"""Steps on a device that runs beside the host: what is sent, in which order it is submitted, and what comes back."""
