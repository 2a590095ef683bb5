"""Try a user's own loss, similarity, encoder or extractor on a small batch, and write templates for them."""
