"""Measurements of fsdp_wrap against its competitors."""
