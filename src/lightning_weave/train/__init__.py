"""Fit a student to a composition of cached shifts: compose while loading, one-pass loss, one rank or many."""
