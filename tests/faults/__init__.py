"""Suites of faults: damaged files, killed processes, hostile input. ``docs/faults.md`` prints their counts."""
