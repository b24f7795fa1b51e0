"""Prepare sizes before the first image."""
