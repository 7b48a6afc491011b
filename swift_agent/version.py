"""The version, for what must not import the package's own names. This module must never import anything."""

__version__ = "0.1.0"
