"""Batching and fast decoding, in rooms: see docs/architecture.md."""
