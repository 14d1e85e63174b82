"""Which models are served, and who has to go when another wants the room.

register.py   from the name in a request to a model        kept.py   one model: its state, its users
road.py       the blocking calls, and the loading thread   room.py   who gives way to whom
manager.py    one change at a time
"""

from localllm.manager.manager import ModelManager

__all__ = ["ModelManager"]
