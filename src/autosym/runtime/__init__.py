"""What has no mathematics in it: batches, processes, CUDA graphs, files, tables of text."""
