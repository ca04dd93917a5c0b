"""LoRA adapters in PEFT's format: what they hold, whether they fit a model, and merging them into its weights.

Owns: adapter_config.json, the names of an adapter's tensors, slices of linears for the run time, merged weights.
In: an adapter's folder, and the `DecoderSpec` of the model or the tensors of its checkpoint. No torch.
Out: an `Adapter` by layer and linear, or the checkpoint's tensors with adapters added to them.
Imports: `model`'s own files, `families` for the names of tensors, `checkpoint`.
Start with: `config.py`, then `weights.py`; `matrices.py` reads the numbers for the run time.
"""
