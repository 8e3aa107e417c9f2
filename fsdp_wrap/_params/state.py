"""The state of a unit's full parameters: where they are, and how long they stay."""

from __future__ import annotations

from enum import Enum


class Where(Enum):
    """Where the full parameters of a unit are.

    Attributes:
        SHARDED: Nowhere: each rank has its shard.
        GATHERING: Their buffers are allocated and being filled.
        FULL: In memory, for forward and backward.
        LENT: The user has them, or a state dict shows others in their place: no forward, no backward.
    """

    SHARDED = "sharded"
    GATHERING = "being gathered"
    FULL = "unsharded"
    LENT = "in the hands of the user"


MOVES = (  # a tuple: a set would call the Python function that hashes an `Enum`
    (Where.SHARDED, Where.GATHERING),
    (Where.GATHERING, Where.FULL),
    (Where.FULL, Where.SHARDED),
    (Where.SHARDED, Where.LENT),
    (Where.LENT, Where.SHARDED),
)
"""The moves that are allowed."""


class Until(Enum):
    """The moment until which full parameters stay.

    Attributes:
        NOW: They are freed as soon as nothing computes with them.
        OUTERMOST: The end of the outermost forward.
        BACKWARD: The unit's backward. Attributes of the modules show them until then.
        EARLIER: The unit's backward of an earlier forward. A new forward of the unit gathers anew.
        END: The end of the tree's backward: no trigger ends a double backward earlier.
        FORWARD: The next outermost forward, which frees them. A double backward may come before.
        NEXT: The next iteration, which takes them over unless they have changed.
    """

    NOW = "now"
    OUTERMOST = "the outermost forward ends"
    BACKWARD = "the backward"
    EARLIER = "the backward of an earlier forward"
    END = "the end of the tree's backward"
    FORWARD = "the next outermost forward"
    NEXT = "the next iteration"
