"""Synthetic recall: see README.md (why and how)."""
