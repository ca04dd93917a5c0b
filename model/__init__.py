"""Models: configuration, weights, decoder, KV cache, tokenizer and chat template.

Knows kernels and tensors; nothing of requests, stages or HTTP. Importing `config`, `tokenizer`, `detokenizer`, `chat`,
`generation` or `hub` does not import torch, so that everything in front of the device starts without it.
"""
