"""Detection of collectives that do not complete, and reports of the positions of ranks.

Lives here: the watch over collectives that the host waits for, the monitor of those that it does not wait
for, and the bulletin by which ranks of several hosts exchange their positions.
May import: `_core`, and of `_comm` groups, positions and the device.
Must never know: the data that travel, and the communicator.
"""
