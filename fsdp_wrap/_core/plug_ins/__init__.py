"""The one way to attach to steps: plug-ins, their moments, and what is built of them alone.

Lives here: `PlugIn` and the collections of plug-ins, spans, events for users, ranges of the profiler.
May import: the rest of `_core`.
Must never know: units, layouts and steps; it passes them on.
"""
