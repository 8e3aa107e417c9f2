"""Compressed gathers and reductions.

Lives here: codecs, and `compress`. Deleting this folder leaves plain collectives.
May import: all below.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._compression import compression as compression
