"""Training for phrase localisation: regions are matched with phrases (two-branch paper, Wang et al., TPAMI 2018, section 4).

May import the solvers, and the packages that solvers may import.
"""
