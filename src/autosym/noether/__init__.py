"""Noether's razor: conserved quantities of Hamiltonian dynamics, learned from trajectories by evidence."""

from autosym.noether.conserved import Network, Quadratic
from autosym.noether.discovering import Search, discover
from autosym.noether.discovery import Discovery, Quantity

__all__ = ["Discovery", "Network", "Quadratic", "Quantity", "Search", "discover"]
