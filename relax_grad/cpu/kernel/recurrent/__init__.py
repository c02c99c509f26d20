"""Recurrent layers and their gradient."""
