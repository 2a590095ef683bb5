"""How the weights of a model are found, epoch by epoch: Adam, CCA. May import data, models, losses and run."""
