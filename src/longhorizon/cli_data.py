"""`longhorizon data`: which data sets are there, and fetching and verifying them."""

import sys

import click

from longhorizon import data as sets
from longhorizon.console import arriving


@click.command()
@click.argument("names", nargs=-1)
@click.option("--data-root", default="", help="Where they are kept.  [default: LONGHORIZON_DATA]")
@click.option("--download", is_flag=True, help="Fetch what is missing.")
@click.option("--verify", is_flag=True, help="Compare the md5 of every file with what was published.")
def data(names: tuple[str, ...], data_root: str, download: bool, verify: bool) -> None:
    """Show which data sets are on disk, fetch missing ones, and verify them.

    Exits with 1 if a set that was named cannot be used, or one that is there is broken.
    """
    try:
        wanted = [sets.key_of(name) for name in names]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    failed = False
    for name in wanted or sets.NAMES:
        try:
            with arriving() as progress:
                images = sets.load(name, data_root or None, download=download, verify=verify, progress=progress)
        except sets.DataError as error:
            failed = failed or bool(names) or not isinstance(error, sets.MissingDataError)
            print(f"{name}: {error}".replace("; ", ";\n    "))  # a missing set's message is long
            continue
        same = ", as published" if verify and name != "digits" else ""
        print(f"{name}: {len(images.train_labels)} training and {len(images.test_labels)} test images{same}")
    if failed:
        sys.exit(1)
