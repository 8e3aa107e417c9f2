"""Parameters that are distributed before they are sharded: `DTensor`s, as tensor parallelism makes them.

Lives here: local parts of such parameters and who holds them, sums of their gradients, placements over all
meshes.
May import: `_core`, `_comm`.
Must never know: how layouts cut local parts, and when that happens.
"""

from fsdp_wrap._params.parallel.data_mesh import DataMesh, typed_part
from fsdp_wrap._params.parallel.in_graphs import Redistribution
from fsdp_wrap._params.parallel.local_part import (
    HeldBy,
    LocalPart,
    check_beside,
    copyable,
    dtensor_of,
    holding,
    make_copyable,
    placed,
    to_local,
)
from fsdp_wrap._params.parallel.partial_sums import PartialSums
