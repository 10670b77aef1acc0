"""Measuring: one timing protocol (harness.py), rows made with it, and plots, records and README text made of rows."""
