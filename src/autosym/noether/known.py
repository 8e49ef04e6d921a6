"""Known conserved quantities of degree two, to name the quantities found; quantities in symbols."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import torch
from torch import Tensor

AXES = "xyz"


@dataclass(frozen=True)
class Known:
    """C(x) = 1/2 x^T A x + b^T x, with a name."""

    name: str
    A: Tensor
    b: Tensor

    def vector(self, scale: float = 1.0) -> Tensor:
        """(A, b) as one unit vector, with x in units of ``scale``: the product of two such vectors is the cosine of their angle."""
        return unit(torch.cat([self.A.flatten(), self.b / scale]))


def unit(v: Tensor) -> Tensor:
    return v / v.norm()


def product(name: str, a: Tensor, b: Tensor) -> Known:
    """C = (a^T x) (b^T x)."""
    return Known(name, torch.outer(a, b) + torch.outer(b, a), torch.zeros_like(a))


def total(name: str, parts: Sequence[Known]) -> Known:
    return Known(name, torch.stack([k.A for k in parts]).sum(0), torch.stack([k.b for k in parts]).sum(0))


def catalogue(count: int, space: int = 1) -> list[Known]:
    """What ``count`` coordinates may conserve as bodies in ``space`` dimensions; with space = 1, also each coordinate by itself."""
    if space > 1:
        return [*bodies(count // space, space), *(_along(space) if count == space else ())]
    energy = list(unitary(count))
    whole = [total("energy", energy[:count])] if count > 1 else []
    _, p = _coordinates(count)
    momenta = [Known(f"momentum {i + 1}", torch.zeros_like(energy[0].A), p[i]) for i in range(count)]
    return [*energy, *whole, *momenta, *(bodies(count, 1) if count > 1 else [])]


def _along(space: int) -> Iterator[Known]:
    """The energies of one body along each axis, and their sum, as springs along the axes conserve them."""
    parts = [energy for energy in unitary(space) if energy.name.startswith("energy")]
    yield from (Known(f"energy {axis}", part.A, part.b) for axis, part in zip(AXES, parts, strict=False))
    yield total("energy", parts)


def unitary(count: int) -> Iterator[Known]:
    """The generators of U(count): energies, exchanges q_i q_j + p_i p_j and angular momenta q_i p_j - q_j p_i."""
    q, p = _coordinates(count)
    for i in range(count):
        name = "energy" if count == 1 else f"energy {i + 1}"
        half = total(name, [product("", q[i], q[i]), product("", p[i], p[i])])
        yield Known(name, half.A / 2, half.b)
    for i, j in combinations(range(count), 2):
        yield total(f"exchange {i + 1} {j + 1}", [product("", q[i], q[j]), product("", p[i], p[j])])
        yield total(f"angular momentum {i + 1} {j + 1}", [product("", q[i], p[j]), product("", -q[j], p[i])])


def bodies(count: int, space: int, masses: Tensor | None = None) -> Iterator[Known]:
    """Total momenta, angular momenta, and the products of total momenta with each other and with the centre (Q x P).

    All are conserved by bodies whose forces depend on their distances only. Masses weigh the centre, and are equal by default.
    """
    q, p = (t.reshape(count, space, -1) for t in _coordinates(count * space))
    Q, P = (q if masses is None else masses[:, None, None] * q).sum(0), p.sum(0)
    letters = AXES[:space] if space > 1 else [""]
    for axis in range(space):
        yield Known(f"momentum {letters[axis]}".strip(), torch.zeros(q.shape[-1], q.shape[-1], dtype=q.dtype), P[axis])
    for i, j in combinations(range(space), 2):
        turns = [product("", sign * q[body, a], p[body, b]) for body in range(count) for a, b, sign in ((i, j, 1), (j, i, -1))]
        yield total("angular momentum" if space == 2 else f"angular momentum {letters[i]}{letters[j]}", turns)
    for i, j in combinations_with_replacement(range(space), 2):
        one, other = (f"momentum {letters[axis]}".strip() for axis in (i, j))
        yield product(f"{one} squared" if i == j else f"{one} times {other}", P[i], P[j])
    for i, j in combinations(range(space), 2):
        name = "of the centre" if space == 2 else f"of the centre, {letters[i]}{letters[j]}"
        yield total(f"angular momentum {name}", [product("", Q[i], P[j]), product("", -Q[j], P[i])])


def _coordinates(count: int) -> tuple[Tensor, Tensor]:
    """The unit vectors of q and of p, (count, 2 count) each."""
    q, p = torch.eye(2 * count, dtype=torch.float64).chunk(2)
    return q, p


def coordinates(count: int, space: int = 1) -> list[str]:
    """Names of the coordinates: q1 ... pn, or x1, y1 ... px1, py1 ... for bodies in space."""
    if space == 1:
        return [f"{kind}{i + 1}" for kind in "qp" for i in range(count)]
    places = [f"{AXES[axis]}{body + 1}" for body in range(count // space) for axis in range(space)]
    return places + [f"p{place}" for place in places]


def symbols(A: Tensor, b: Tensor, names: Sequence[str], states: Tensor | None = None, negligible: float = 0.02) -> str:
    """1/2 x^T A x + b^T x in symbols, without terms below ``negligible`` of the largest.

    Terms are compared by their deviation over ``states`` (S, M), or by their factors if none are given.
    """
    terms: dict[str, tuple[float, tuple[int, ...]]] = {names[i]: (float(b[i]), (i,)) for i in range(len(b))}
    for i, j in combinations_with_replacement(range(len(b)), 2):
        key = f"{names[i]}^2" if i == j else f"{names[i]} {names[j]}"
        terms[key] = (float(A[i, j]) / (2 if i == j else 1), (i, j))
    sizes = {
        key: abs(factor) * (1.0 if states is None else float(states[:, list(of)].prod(1).std(correction=0)))
        for key, (factor, of) in terms.items()
    }
    largest = max(sizes.values())
    kept = [(key, factor) for key, (factor, _) in terms.items() if largest and sizes[key] >= negligible * largest]
    text = " ".join(f"{'-' if factor < 0 else '+'} {_short(abs(factor))} {key}" for key, factor in kept)
    return text.removeprefix("+ ").replace("- ", "-", 1) if text.startswith("-") else text.removeprefix("+ ") or "0"


def _short(factor: float) -> str:
    """Two decimals, or as many as show two digits."""
    return f"{factor:.2f}" if factor >= 0.1 else f"{factor:.2g}"
