"""The log of collectives that each rank has issued, which other ranks of its host read even after it died.

The ranks of a group must issue the same collectives in the same order. So each rank numbers the collectives
of its units in a group, and logs them with unit, phase and iteration. Ranks whose entries of one number
differ are mixed up. Nothing else would show it: gathers of equal size from different units complete, with
wrong parameters.

Lives here: the memory-mapped log (`host_log.py`) and its files (`log_files.py`), what a log entry says
(`notes.py`), the log of a group (`group.py`) and of the units (`units.py`), and agreement on settings through
the store (`agreement.py`).
May import: `_core`, and groups of `_comm`.
Must never know: the data that travel, and the communicator.
"""
