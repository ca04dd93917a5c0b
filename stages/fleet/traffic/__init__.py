"""What a front does by the labels of its engines: the split of requests, and copies of them.

Owns: the rules that hold now, the copies in flight, and what became of the requests of each side.
In: prompts that are sent, steps of engines, and the ends of requests.
Out: the engines that a request may go to; copies of prompts, and steps without those of copies.
Imports: `runtime`, the root of `stages`, `exit`, `split`, `traffic`.
Start with: `fleet_traffic.py`, then `shadow_copies.py`.
"""
