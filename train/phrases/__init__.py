"""Training that localises phrases: regions and phrases of captions are matched, not images and captions.

Two-branch paper (Wang et al., TPAMI 2018), section 4. May import what solvers may, and the solvers.
"""
