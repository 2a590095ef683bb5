"""The feature cache: its rows, shards, checksums and reader."""
