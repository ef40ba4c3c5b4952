"""Engines that use the library without a line of theirs changed: one module for each."""
