"""LoRA adapters at run time: their names, their loading, and their tensors on the host.

Owns: the names that clients may send, what each computes (its digest), the adapters in host memory, who uses them,
which are pinned, and the chat templates in their folders.
In: names and folders from the settings and the API; requests, before they may wait for a slot.
Out: requests with the digest of their adapter; tensors for the device thread, by digest.
Imports: the root of `stages`, `runtime`, `model/lora`, `model/text`.
Start with: `registry.py`, then `gate.py` and `loader.py`; the device's slots are in `schedule/adapter_slots.py`.
"""
