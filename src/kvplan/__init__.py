"""What kvplan offers at its front door. Implementations live in the rooms below it.

The whole model in one sentence: each rank declares which coordinates of the cache lie at which bytes of a block; a
plan is the intersection of two declarations; a transport moves it.
"""

from kvplan.version import __version__

__all__ = ["__version__"]
