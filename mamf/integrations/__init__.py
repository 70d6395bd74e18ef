"""Integrations that need torch or a training library. These are imported only here, and only when used."""
