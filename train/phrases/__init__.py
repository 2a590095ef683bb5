"""Training for the localisation of phrases: it matches regions and phrases of captions, not images and captions.

Two-branch paper (Wang et al., TPAMI 2018), section 4. May import the solvers, and the packages that solvers may import.
"""
