"""Nodes and roles of an attempt. Pure: the inventory is passed in."""
