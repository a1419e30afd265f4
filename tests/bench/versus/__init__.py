"""Relevo and other servers on the same work, through the same client, in turn."""
