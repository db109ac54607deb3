"""Packages that only some features need."""

import importlib


def need(extra: str, *packages: str) -> None:
    """Refuse to go on without optional packages, naming what to install.

    >>> need("report", "no_such_package")
    Traceback (most recent call last):
    ImportError: no_such_package is missing: pip install "longhorizon[report]".
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(f'{package} is missing: pip install "longhorizon[{extra}]".') from error
