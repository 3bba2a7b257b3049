"""The commands of `consignee`, a module for each kind."""
