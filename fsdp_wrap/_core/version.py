"""The version of the library, and the versions of torch that it is for; `setup.py` runs this file."""

__version__ = "0.2.0.dev0"

OLDEST_TORCH, NEWEST_TORCH = "2.11", "2.15"
"""The oldest version of torch that has what is needed, and the newest that was tested."""
