"""Code shared by the prepare.py programs."""
