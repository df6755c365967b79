"""What a job's rows will be, before it is prepared: from those of jobs that were."""

from __future__ import annotations

import math

from omni_grpc.resolve.work import pixels
from omni_grpc.types.request import Request, has_negative

PIXELS_A_TOKEN = 256
"""Before any job was prepared: a VAE that makes 8 x 8 pixels one, and patches of 2 x 2."""
SIZES = 256
"""Of outputs that are remembered, the newest."""


class Estimate:
    """Tokens by size of an output. It is meant to be too high rather than too low: of one size, the most that was seen;
    of one that was not, that of the next larger one, or of the largest in proportion.
    """

    def __init__(self) -> None:
        self._tokens: dict[float, int] = {}
        self._rows = 1.0
        """Rows over those that outputs and guidance make."""

    def learn(self, request: Request, rows: tuple[int, ...]) -> None:
        """A job was prepared, and these are the tokens of its rows."""
        if not rows:
            return
        size = _size(request)
        self._tokens[size] = max(self._tokens.pop(size, 0), *rows)
        if len(self._tokens) > SIZES:
            del self._tokens[next(iter(self._tokens))]
        self._rows = max(self._rows, len(rows) / _count(request))

    def rows(self, request: Request) -> tuple[int, ...]:
        """The tokens of each row that a job will probably have."""
        size = _size(request)
        larger = min((seen for seen in self._tokens if seen >= size), default=None)
        if larger is not None:
            tokens = self._tokens[larger]
        elif self._tokens:
            largest = max(self._tokens)
            tokens = math.ceil(self._tokens[largest] * size / largest)
        else:
            tokens = math.ceil(size / PIXELS_A_TOKEN)
        return (tokens,) * math.ceil(_count(request) * self._rows)


def _size(request: Request) -> float:
    return pixels(request) / request.num_outputs


def _count(request: Request) -> int:
    return request.num_outputs * (1 + has_negative(request))
