"""Parameters that are `DTensor`s before they are sharded, as tensor parallelism makes them.

Lives here: local parts of such parameters, the sums of their gradients, and placements over all meshes.
May import: `_core`, `_comm`.
Must never know: how layouts cut local parts, and when that happens.
"""

from fsdp_wrap._params.parallel.data_mesh import DataMesh
from fsdp_wrap._params.parallel.in_graphs import Redistribution
from fsdp_wrap._params.parallel.local_part import (
    LocalPart,
    check_beside,
    copyable,
    dtensor_of,
    holding,
    local_parts,
    make_copyable,
    placed,
    to_local,
)
from fsdp_wrap._params.parallel.partial_sums import PartialSums
