"""A client of Ginnel's caches, which reads items in shared memory."""

from ._cache import Cache, Counters, Item
from ._library import Error, Lost, NoServer, NotFound, Refused, TooLarge

__all__ = ["Cache", "Counters", "Error", "Item", "Lost", "NoServer", "NotFound", "Refused", "TooLarge"]
__version__ = "0.1.0"
