"""Requests: their parameters, when they stop, how tokens are drawn, and what runs next."""
