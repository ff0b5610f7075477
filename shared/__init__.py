"""The course's small helper: one file for each question that a notebook asks of its kernel.

Start with :func:`shared.machine.setup`; the README of the course has the map.
"""
