"""Training: encoders, similarities, losses, batches, solvers, and the use of trained models."""

if __name__ != "vse.training":
    raise ImportError(f"import this package as vse.training, not {__name__}: two copies would not share classes")
