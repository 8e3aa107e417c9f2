"""A process that writes a rank's files of background saves.

Lives here: memory that both processes see, the process, and its work. Deleting this folder leaves a thread.
May import: all below, and `checkpoint`.
Must never know: what the tensors are.
"""

from fsdp_wrap._writer_process import process as process
