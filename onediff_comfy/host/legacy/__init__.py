"""Workflows of the earlier OneDiff."""
