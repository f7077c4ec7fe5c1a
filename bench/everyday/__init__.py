"""Everyday programs, with xpool and with its alternatives."""
