"""Seconds of messages: links, groups of ranks, collectives."""
