"""Communication between ranks.

Lives here: groups and meshes, the `Communicator` and its kinds, lanes of streams, the positions of ranks and
the watch over them.
May import: `_core`.
Must never know: parameters, units, and why they communicate.
"""

from fsdp_wrap._comm.buffers import Buffer, ResidentBuffer, resize_watchers, tell_resized
from fsdp_wrap._comm.calls import calling
from fsdp_wrap._comm.collectives import all_gather_object, as_transport, reduce_scatter_single
from fsdp_wrap._comm.device import (
    Accelerator,
    accelerator_of,
    check_present,
    device_of,
    device_type_for,
    planning_for,
    resolve_device,
)
from fsdp_wrap._comm.group_memory import GroupMemory, SymmetricMemory, registered_memory, symmetric_memory
from fsdp_wrap._comm.groups import (
    CARRY_NOTHING,
    PLANNED,
    PlannedRounds,
    Ranks,
    ShardMesh,
    default_group,
    default_mesh,
    group_of,
    group_over,
    host_group_over,
    host_id,
    mesh_over,
    neighbours,
    planned_rounds,
    ranks_in,
    ranks_of,
    resolve_mesh,
)
from fsdp_wrap._comm.lanes import (
    Finished,
    FromHost,
    HostLane,
    Pending,
    Then,
    ToHost,
    await_arrivals,
    await_copies,
    copy_to_device,
    copy_to_host,
    host_lane_of,
    lane_of,
)
from fsdp_wrap._comm.messages import Messages, when_completed
from fsdp_wrap._comm.positions.agreement import Agreement
from fsdp_wrap._comm.positions.group import Collective, GroupPositions, describe_here, positions_of
from fsdp_wrap._comm.positions.notes import Note
from fsdp_wrap._comm.positions.units import Tree, UnitCollective, UnitPositions
from fsdp_wrap._comm.process_group import Communicator, GroupCommunicator, destroyed
from fsdp_wrap._comm.select import SAME_SETTINGS, make_communicator
from fsdp_wrap._comm.watching.watch import Watch, deaths_told
from fsdp_wrap._comm.works import Works
