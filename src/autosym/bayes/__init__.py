"""Priors and likelihoods."""
