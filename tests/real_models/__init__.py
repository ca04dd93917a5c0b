"""Published models that packages carry, served as Hugging Face folders and compared with transformers.

The packages hold GGUF files. `gguf_folder.py` makes a folder of each once, in `~/.cache/millrace-tests`.
"""
