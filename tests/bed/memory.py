"""How much memory live tensors hold: found from Python's objects, so independent of anything under test."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_LOOKS = 50
_STEADY = 3


def live_bytes(keep: Callable[[torch.Tensor], bool] | None = None) -> int:
    """Sum the bytes of the storages of all live tensors (those that ``keep`` accepts), each byte once.

    A freed storage (``resize_(0)``) counts nothing. Seen are tensors that have, or once had, a Python object;
    what autograd's C++ nodes made and hold is not. Left out is what has no memory: meta, fake, wrappers.
    """
    ends: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
        for tensor in (candidate for candidate in objects if type(candidate) in kinds):
            if _has_storage(tensor) and (keep is None or keep(tensor)):
                storage = tensor.untyped_storage()
                start = storage.data_ptr()
                ends[start] = max(start + storage.nbytes(), ends.get(start, 0))
    total = counted = 0
    for start, end in sorted(ends.items()):  # storages made over another's memory overlap it
        total += max(0, end - max(start, counted))
        counted = max(counted, end)
    return total


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Lets ``live_bytes`` see only what is made inside: fast also where a process holds a million objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def settled_bytes() -> int:
    """Returns the live bytes once they no longer change: gloo's threads let go of sent tensors late."""
    gc.collect()
    looks = [live_bytes()]
    while len(looks) < _STEADY or len(set(looks[-_STEADY:])) > 1:
        time.sleep(0.05)
        looks.append(live_bytes())
    return looks[-1]


class Peak(TorchDispatchMode):
    """The most bytes live at once, looked at whenever a large tensor was made.

    Above `suspect` bytes it looks again for a while: gloo's threads let go of sent tensors late.
    """

    def __init__(self, suspect: float) -> None:
        super().__init__()
        self.value, self.suspect = 0, suspect

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() > 10000 and not result.is_meta:
            for _ in range(_LOOKS if self.value <= self.suspect else 0):
                if live_bytes() <= self.suspect:
                    break
                time.sleep(0.1)
            self.value = max(self.value, live_bytes())
        return result


def _has_storage(tensor: torch.Tensor) -> bool:
    # A wrapper's inner tensors are found themselves; a fake tensor's storage is on the meta device.
    if is_traceable_wrapper_subclass(tensor) or not torch._C._has_storage(tensor):
        return False
    return tensor.untyped_storage().device.type != "meta"
