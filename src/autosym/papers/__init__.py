"""The published experiments: datasets, runs as data, tables."""
