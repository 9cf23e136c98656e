"""Settings: config files, `GPTConfig`, and the schema of every program's keys. No torch here."""
