"""The errors of this package's data readers."""


class DataError(RuntimeError):
    """A data set is missing, or one of its files is not what it should be; says which file, and what to do."""


class MissingDataError(DataError):
    """A data set is not there, and was not downloaded."""
