"""The models that a server loads, and which of them is evicted when another model needs the memory.

register.py   from the name in a request to a model        kept.py   one model: its state and its leases
road.py       the blocking calls, and the loading thread   room.py   the order of eviction
manager.py    one load, sleep or unload at a time
"""

from localllm.manager.manager import ModelManager

__all__ = ["ModelManager"]
