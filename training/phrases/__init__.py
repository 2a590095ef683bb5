"""Training for phrase localisation, which matches regions with phrases (two-branch paper, section 4)."""
