"""Subcommands of `forge-ptq`, one file each: ``add(commands)`` registers it."""
