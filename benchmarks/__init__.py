"""Measurements: one command for each question, raw data in results/."""
