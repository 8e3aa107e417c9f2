"""`verify`: the same program sharded and plain, and what makes the two differ.

Lives here: the runs of both, in processes of their own, what each rank observes, and the causes.
May import: `_core`, `_comm`, `_params`, `_runtime`, and the records of `_values`.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._values.verifying.report import Verification
from fsdp_wrap._values.verifying.verify import verify

__all__ = ["Verification", "verify"]
