"""How a rank notices that collectives do not complete, and tells what the ranks did.

Lives here: the watch over what the host waits for, the monitor of what it does not wait for, and the
bulletin on which ranks of several hosts tell each other where they stand.
May import: `_core`, and of `_comm` groups, positions and the device.
Must never know: what travels, and by which communicator.
"""
