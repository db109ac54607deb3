"""Where data sets live on disk."""

import os
from pathlib import Path

VARIABLE = "LONGHORIZON_DATA"


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds the data sets.

    Args:
        root: the folder; without it the environment variable LONGHORIZON_DATA, and without that
            `longhorizon/data` in the user's cache folder (`~/.cache`, or XDG_CACHE_HOME).

    >>> data_root("/somewhere/else").name
    'else'
    """
    if root is not None:
        return Path(root).expanduser()
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "longhorizon" / "data"
