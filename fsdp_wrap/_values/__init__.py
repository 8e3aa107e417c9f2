"""Values of steps: what made one NaN or infinite, records of them to compare, and silent corruption.

Lives here: the context `find_nonfinite`, `record_values` and the comparison of two records; in `verifying/`
`verify`, which makes and compares them; in `auditing/` `audit`.
May import: `_core`, `_comm`, `_params`, `_runtime`, `_state`.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._values.auditing.audit import Audit, audit
from fsdp_wrap._values.auditing.corruption import Corruption, CorruptionError
from fsdp_wrap._values.find import find_nonfinite
from fsdp_wrap._values.finding import NonFinite, NonFiniteError
from fsdp_wrap._values.record import ValueRecord, record_values
from fsdp_wrap._values.verifying import Verification, verify

__all__ = [
    "Audit",
    "Corruption",
    "CorruptionError",
    "NonFinite",
    "NonFiniteError",
    "ValueRecord",
    "Verification",
    "audit",
    "find_nonfinite",
    "record_values",
    "verify",
]
