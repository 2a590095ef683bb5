"""Training for phrase localisation: regions are matched with phrases (two-branch paper, section 4). May import the solvers."""
