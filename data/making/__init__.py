"""What the prepare.py programs share."""
