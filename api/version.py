"""The installed version, read once."""

from importlib.metadata import version

VERSION = version("forq")
