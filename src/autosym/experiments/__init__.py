"""The experiments: the runs as data, the rows, nothing else."""
