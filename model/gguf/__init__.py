"""Reads GGUF files: header, blocks of packed numbers, architectures, tokenizers.

Owns: the format, and the folder in Hugging Face form that stands for a file.
In: a `.gguf` file, or the first of several.
Out: a folder with config.json, tokenizer and chat template, and a checkpoint of its tensors by Hugging Face names.
Imports: the root of `model`.
Start with: `folder.py`, then `reader.py`.
"""
