"""Values of steps: what made one NaN or infinite, and records of them to compare.

Lives here: the context `find_nonfinite`, `record_values`, and the comparison of two records; in `verifying/`
`verify`, which makes and compares them.
May import: `_core`, `_comm`, `_params`, `_runtime`, `_state`.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._values.find import find_nonfinite
from fsdp_wrap._values.finding import NonFinite, NonFiniteError
from fsdp_wrap._values.record import ValueRecord, record_values
from fsdp_wrap._values.verifying import Verification, verify

__all__ = [
    "NonFinite",
    "NonFiniteError",
    "ValueRecord",
    "Verification",
    "find_nonfinite",
    "record_values",
    "verify",
]
