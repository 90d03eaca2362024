"""Runnable examples of mars_optax."""
