"""What clients see when something breaks: real processes, one fault at a time, outcomes and seconds asserted.

Run alone with ``scripts/test tests/fault``; ``python -m tests.fault.table`` runs it and rewrites ``docs/faults.md``.
"""
