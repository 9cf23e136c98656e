"""Token files, the datasets that fill them, tokenizers, and the recall task; no torch here."""
