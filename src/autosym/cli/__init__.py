"""The command line, and how it reads a user's files."""
