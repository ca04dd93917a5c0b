"""What is measured on a GPU. Without one: what it would be held against, and a message that says so."""
