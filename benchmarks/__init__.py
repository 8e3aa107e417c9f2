"""Measurements of fsdp_wrap against its competitors: `python -m benchmarks` runs all, each script one."""
