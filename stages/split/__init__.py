"""The engine in a process of its own: the front has HTTP and the stages of text, the engine the step loop."""
