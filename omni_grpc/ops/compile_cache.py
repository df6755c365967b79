"""The folder where torch keeps compiled code: made when torch's compiler is imported, even if nothing compiles."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from omni_grpc.types.errors import ConfigError
from omni_grpc.types.os_errors import reason

logger = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def ensure() -> None:
    """Points the variable to a folder of this user's in the temporary one where it names one that cannot be written,
    and warns; left alone, torch would end the import with a bare error of the system.

    Raises ConfigError where that folder cannot be written either.
    """
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return  # torch takes the temporary folder
    if (why := _unusable(Path(asked))) is None:
        return
    mine = Path(tempfile.gettempdir()) / f"omni_grpc-{os.getuid()}"
    other = mine / "torchinductor"
    lack = _unusable(mine) or (None if mine.stat().st_uid == os.getuid() else "it belongs to another user")
    if (lack := lack or _unusable(other)) is not None:
        raise ConfigError(
            f"{VARIABLE} is {asked}, which cannot be written ({why}), and neither can {other} ({lack}); set {VARIABLE} "
            "or TMPDIR to a folder that can",
            reason="CACHE_NOT_WRITABLE",
        )
    logger.warning("%s is %s, which cannot be written (%s); using %s", VARIABLE, asked, why, other)
    os.environ[VARIABLE] = str(other)


def _unusable(folder: Path) -> str | None:
    """Why a folder cannot be written, None if it can; it is made where it is not there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return reason(error)
    return None if os.access(folder, os.W_OK) else "it is read-only"
