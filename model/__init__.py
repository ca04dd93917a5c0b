"""Models: configuration, weights, decoder, KV cache, encoders, tokenizer and chat template.

Owns: what a checkpoint is and how a step of its model is computed. Does not depend on requests, stages or HTTP.
In: a checkpoint's folder or Hub id; step inputs, or texts.
Out: logits and hidden states, or token ids and texts.
Imports: `kernels`, in `model/decoder` and for the layout of memory in `kv_kinds.py`. `checkpoint`, `text` and the root
except `profiler` do not import torch.
Start with: `config.py`, then `decoder/decoder.py`.
"""
