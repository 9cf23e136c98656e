"""Conversations as users have them, as a benchmark for any server (README.md)."""
