"""What was found: measured equivariance, and which model the data ask for."""
