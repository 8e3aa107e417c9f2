"""What users, and other ranks, ask of a step by hand, between the moments of its path.

Lives here: gathers, ends of backwards, sums of gradients by request, and what must not run inside a step.
May import: `_core`, `_comm`, `_params`, `_runtime`, `_building`.
Must never know: the surface of the front-ends, and state dicts.
"""

from fsdp_wrap._by_hand.backwards import (
    await_reduction,
    end_backwards_of,
    end_failed_backward,
    finalize,
    reset,
)
from fsdp_wrap._by_hand.endings import ManualEnd, set_manual
from fsdp_wrap._by_hand.parameters import follow, reshard, show_unsharded, showing, unshard, wait_for
from fsdp_wrap._by_hand.ranks import ranks_of
from fsdp_wrap._by_hand.rest import joins, note_change, require_idle
from fsdp_wrap._by_hand.sums import (
    no_sync,
    refuse_steps_between_sums,
    require_between_backwards,
    set_sums,
    sum_in_backward,
    summing,
)
