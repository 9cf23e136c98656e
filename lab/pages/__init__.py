"""The measured numbers in README.md and docs/, written from the files under results/."""
