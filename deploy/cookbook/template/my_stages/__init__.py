"""Our stages for millrace."""
