"""Layouts of buffers that the host writes and kernels read: sampling rows, step state, lists of attention and LoRA.

Beside them, what a layer's kernels can be told: `layer_options.py`; weights in groups of codes: `grouped_codes.py`;
the sampling fields of a request, once for all layers: `sampling_fields.py`; how an answer ends: `finish_rule.py`; the
kinds of memory for keys and values: `kv_layout.py`; and the states of recurrent layers: `state_layout.py`.

Owns: the order, type and meaning of every field in them, and the plain twins of the kernels that fill them.
In: sizes and plain arrays.
Out: packed rows, views of buffers, and lists of attention work.
Imports: numpy, torch; nothing of the package.
Start with: `step_state.py`; `work_lists.py` describes the division of attention into even parts, `list_work.py` is its
plain twin, and `attention_tilings.py` has the launch shapes.
"""
