"""Change a user's model, and change it back: relax, lift, simplify, harden."""
