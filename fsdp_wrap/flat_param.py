"""`FlatParameter`, under the path that torch has for it."""

from fsdp_wrap._params import FlatParameter

__all__ = ["FlatParameter"]

FlatParameter.__module__ = __name__  # the path that errors and pickles name
