"""State over replicas: hybrid sharding whose parameters, gradients and optimizer state all ranks share.

Lives here: the flattened meshes, and the `Transport` that gathers and reduces in two stages. Deleting this
folder leaves state that each copy holds whole.
May import: all below.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._state_over_replicas import meshes as meshes
