"""What `torch.compile` must know: which frames not to trace, and which modules are units.

Dynamo leaves the runtime to Python, which breaks the graph at every unit, and compiles the modules inside.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import nn

__all__ = ["make_known_to_dynamo"]


def make_known_to_dynamo(modules: Iterable[nn.Module]) -> None:
    """Tells dynamo of the modules of one unit.

    It then takes their parameters as inputs of its graphs, rather than as constants or static addresses:
    leaves have memory only while their unit is unsharded.
    """
    _skip_runtime()
    for module in modules:
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        # Dynamo asks whether modules compute with original parameters. Leaves are, in both forms.
        module._fsdp_use_orig_params = True  # type: ignore[assignment]


@functools.cache
def _skip_runtime() -> None:
    # Late, since this import is slow; an optimizer's constructor imports dynamo as well.
    from torch._dynamo import trace_rules

    trace_rules.add(__name__.partition(".")[0])
