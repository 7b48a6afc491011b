"""The version, for what must not import the package's own names."""

__version__ = "0.1.0"
