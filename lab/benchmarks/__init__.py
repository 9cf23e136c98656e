"""The modes of bench.py, one module each, and the code they share."""
