"""Integrations with training loops. They import torch or a training library, so they are imported only when used."""
