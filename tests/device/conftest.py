"""Keeps pytest from the script and its parts, which are run by hand where a device is at hand."""

collect_ignore = ["bits.py", "check.py", "findings.py", "footprint.py", "order.py", "rates.py"]
