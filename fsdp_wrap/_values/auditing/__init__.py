"""Silent data corruption: drawn steps in which ranks check what they hold, gather, compute and reduce.

Lives here: `audit`, its evidence of a step, and what it concludes from it.
May import: `_core`, `_comm`, `_params`, `_runtime`, and the files of `_values`.
Must never know: which front-end made a unit.
"""
