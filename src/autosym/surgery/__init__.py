"""Change a user's model, and change it back: relax, simplify, harden."""
