"""The tables in README.md and docs/, written from the files under results/."""
