"""Webhooks: whoever asked for it is told over HTTP when a job changes its state."""
