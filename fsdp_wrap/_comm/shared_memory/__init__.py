"""How bytes travel between ranks of one host: through memory that they share.

Lives here: the memory, signals, channels, and collectives made of them. Deleting this folder leaves
gloo's way.
May import: `_core`, `_comm`. Nothing else imports this folder: it can be deleted.
Must never know: parameters, units, and why something travels.
"""

from fsdp_wrap._comm.shared_memory import automatic as automatic
