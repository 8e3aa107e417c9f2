"""Collectives between ranks of one host through shared memory.

Lives here: the memory, signals, channels, and the communicators made of them.
May import: `_core`, `_comm`. Nothing else imports this folder: without it ranks use gloo.
Must never know: parameters, units, and why they communicate.
"""

from fsdp_wrap._comm.shared_memory import automatic as automatic
