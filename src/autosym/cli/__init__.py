"""The command line, and what it does with a user's files."""
