"""The benchmark behind ``lowbatch-lmhead bench``: the ways to the logits of a few rows, measured in turn.

- ``competitors``: the table of the ways, each with why it cannot run here or how it is made ready;
- ``measure``: one head, row count and type of logits: checked, timed, and the memory of a call;
- ``results``: one JSON file for each of these, so that an interrupted run goes on; and the table on the terminal.
"""
