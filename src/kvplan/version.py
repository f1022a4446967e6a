"""The version of this package. Nothing else lives here."""

__version__ = "0.1.0"
