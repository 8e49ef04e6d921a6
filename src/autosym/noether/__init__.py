"""Noether's razor: conserved quantities of Hamiltonian dynamics, learned from trajectories by evidence."""

from autosym.noether.conserved import Network, Quadratic
from autosym.noether.found import Discovery, Quantity
from autosym.noether.search import Search, discover

__all__ = ["Discovery", "Network", "Quadratic", "Quantity", "Search", "discover"]
