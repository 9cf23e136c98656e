"""Text in and out: prompts, dialogues, and a view of the cache in the terminal."""
