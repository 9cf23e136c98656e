"""Settings: plain Python config files, `GPTConfig`, and the schema of every key that a program takes. No torch here."""
