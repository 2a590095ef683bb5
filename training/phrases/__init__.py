"""Training for phrase localisation: a model learns to match regions with phrases (two-branch paper, section 4)."""
