"""The version of the library; `setup.py` runs this file."""

__version__ = "0.1.0"
