"""The version of the package, read by set-up as well."""

__version__ = '0.1.0'
