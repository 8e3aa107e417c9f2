"""The version of the library; `setup.py` runs this file."""

__all__ = ["__version__"]

__version__ = "0.1.0"
