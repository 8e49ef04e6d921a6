"""A user's model in and out: relax, harden, simplify."""
