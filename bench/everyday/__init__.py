"""Everyday programs, with xpool and with what a user would pick instead."""
