"""Construction: modules become units.

Lives here: the checks of a module, its initial values, the sharding of its parameters, and which modules and
parameters units own.
May import: `_core`, `_comm`, `_params`, `_runtime`.
Must never know: when units run, and which front-end makes them.
"""

from fsdp_wrap._building.build import (
    NO_PARTS,
    REGISTRY,
    UnitSpec,
    assemble_unit,
    build_unit,
    check_contents,
    move,
    over_replicas,
)
from fsdp_wrap._building.materialize import MaterializationError, Values
from fsdp_wrap._building.refusals import (
    check_tensors,
    drop_gradients,
    is_container,
    refuse_pieces,
    refuse_sharing,
    shows_shards,
    warn_of_container,
)
